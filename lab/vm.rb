# How libvirt runs a full VM here: with KVM where the processor has it, else emulated, which is some twenty times slower.

module Lab
  module Vm
    # A device file alone proves nothing: some machines have one and can't run a common guest.
    def self.kvm?
      File.writable?("/dev/kvm") && File.read("/proc/cpuinfo").match?(/^flags.* (vmx|svm)\b/)
    end

    # TensorFlow needs AVX, which QEMU's default processor lacks.
    def self.processor
      kvm? ? { driver: "kvm", cpu_mode: "host-passthrough" } : { driver: "qemu", cpu_mode: "maximum" }
    end

    # The kernel of the box that lab/vm.py made in `directory`; the disk has no partitions and no boot loader.
    def self.boot(directory)
      {
        kernel: File.join(directory, "vmlinuz"),
        initrd: File.join(directory, "initrd.img"),
        cmd_line: ["root=/dev/vda rw net.ifnames=0 console=ttyS0", *savings].join(" "),
      }
    end

    # What an emulated processor pays for and a machine of tests doesn't need.
    def self.savings
      kvm? ? [] : ["mitigations=off", "no5lvl"]
    end

    # Seconds until a VM answers on SSH.
    def self.patience
      kvm? ? 120 : 1200
    end
  end
end
