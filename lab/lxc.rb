# What a container needs to know about the lab machine's network, and one fix of vagrant-lxc.

require "ipaddr"
require "socket"

module Lab
  module Lxc
    BRIDGE = "lxcbr0".freeze
    TUN = "/dev/net/tun".freeze

    # The bridge's address with its prefix, e.g. "10.0.3.1/24"; nil before the bridge is up.
    def self.bridge
      interface = Socket.getifaddrs.find { |i| i.name == BRIDGE && i.addr&.ipv4? }
      interface && "#{interface.addr.ip_address}/#{IPAddr.new(interface.netmask.ip_address).to_i.digits(2).sum}"
    end

    # A container's packets leave through the machine's uplink: larger ones than it carries would be lost.
    def self.mtu
      route = File.readlines("/proc/net/route").map(&:split).find { |fields| fields[1] == "00000000" }
      route ? [File.read("/sys/class/net/#{route[0]}/mtu").to_i, 1500].min : 1500
    end

    # The same at every start, so that neighbours need not learn a host's address again after its reboot.
    def self.mac(address)
      format("02:16:%02x:%02x:%02x:%02x", *address.split(".").map(&:to_i))
    end

    # The settings of one host's container. `shared` is nil or {directory here => path there}.
    def self.settings(address, shared)
      prefix = (bridge || "/24").split("/").last
      settings = [
        ["net.0.ipv4.address", "#{address}/#{prefix}"],
        ["net.0.ipv4.gateway", "auto"],
        ["net.0.hwaddr", mac(address)],
        ["net.0.mtu", mtu.to_s],
        # A host that trains takes all that it gets. The control machine, which real hosts don't share, goes before it.
        ["cgroup.cpu.shares", "256"],
        ["cgroup2.cpu.weight", "25"],
      ]
      # The hosts' WireGuard, where this machine's kernel has none: wireguard-go makes its interface by this device.
      if File.chardev?(TUN)
        settings << ["cgroup.devices.allow", "c 10:200 rwm"] << ["cgroup2.devices.allow", "c 10:200 rwm"]
        settings << ["mount.entry", "#{TUN} #{TUN.delete_prefix("/")} none bind,create=file 0 0"]
      end
      (shared || {}).each do |here, there|
        from = here.gsub(" ", '\040')
        settings << ["mount.entry", "#{from} #{there.delete_prefix("/").gsub(" ", '\040')} none bind,create=dir 0 0"]
      end
      settings
    end

    # vagrant-lxc 1.4.3 writes a container's config over the old one without cutting what is longer there,
    # so that every start would add its settings once more.
    def self.fix_config_writing
      require "vagrant-lxc/driver"
      Vagrant::LXC::Driver.prepend(Module.new do
        def write_config(contents)
          File.truncate(config_path, 0) if File.writable?(config_path)
          super
        end
      end)
    rescue LoadError
      nil # no vagrant-lxc: another provider is used
    end
  end
end
