# The lab's view of an Ansible inventory: which hosts, at which addresses, in which groups.

require "yaml"

module Lab
  class InventoryError < StandardError; end

  class Inventory
    attr_reader :file

    # `place` is a hosts.yml or the directory that holds one; a relative path starts at `root`.
    def initialize(place, root)
      path = File.expand_path(place, root)
      @file = File.directory?(path) ? File.join(path, "hosts.yml") : path
      raise InventoryError, "no inventory at #{@file} (PSFLEET_INVENTORY names a hosts.yml or its directory)" unless File.file?(@file)

      @variables = Hash.new { |hosts, name| hosts[name] = {} }
      @groups = Hash.new { |groups, name| groups[name] = [] }
      load_yaml(@file).each { |name, group| walk(name, group, []) }
      raise InventoryError, "#{@file} lists no host" if @variables.empty?
    end

    # Host name => address, in the order in which the hosts are first named.
    def addresses
      found = @variables.to_h { |name, variables| [name, variables["ansible_host"]] }
      found.each do |name, address|
        unless address.to_s.match?(/\A\d{1,3}(\.\d{1,3}){3}\z/)
          raise InventoryError, "host #{name} in #{@file} has #{address ? "ansible_host: #{address}" : "no ansible_host"}: " \
                                "a lab host needs a literal IPv4 address there"
        end
      end
      twice = found.values.tally.find { |_, count| count > 1 }
      return found unless twice

      raise InventoryError, "#{found.select { |_, a| a == twice[0] }.keys.join(" and ")} in #{@file} share ansible_host: #{twice[0]}"
    end

    def group(name)
      @groups.key?(name) ? @groups[name] : []
    end

    # A value of group_vars/all.yml.
    def setting(name)
      vars = File.join(File.dirname(@file), "group_vars", "all.yml")
      File.file?(vars) ? load_yaml(vars)[name] : nil
    end

    private

    def load_yaml(path)
      content = YAML.safe_load(File.read(path), aliases: true) || {}
      raise InventoryError, "#{path} is not a mapping" unless content.is_a?(Hash)

      content
    rescue Psych::Exception => e
      raise InventoryError, "#{path}: #{e.message}"
    end

    def walk(name, group, parents)
      return unless group

      lineage = parents + [name]
      (group["hosts"] || {}).each do |host, variables|
        @variables[host].merge!(variables || {})
        lineage.each { |member_of| @groups[member_of] |= [host] }
      end
      (group["children"] || {}).each { |child, content| walk(child, content, lineage) }
    end
  end
end
