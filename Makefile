# Rekindle. `make help` lists the targets.

.PHONY: help build demo demo-cluster test lint unit guests host cluster package lab benches bench campaign book install deb rpm \
	clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo             replace QEMU 7.2 by 10.0, 11.1 and 7.2 under a guest; saved and cold; reboot a guest cold and'
	@echo '                      with a warm cache; crash a guest and restore it; print the plan for that VM'
	@echo 'make demo-cluster     kill a node of a Pacemaker cluster under load; its guest resumes on another; print the timeline'
	@echo 'make test             the whole check'
	@echo 'make build            target/release/rekindle'
	@echo 'make install          install it: DESTDIR=, PREFIX=/usr/local, BINARY=target/release/rekindle'
	@echo 'make deb | rpm        target/package/*.deb, *.rpm'
	@echo 'make book             target/book/html: all documents as a book; checks their links'
	@echo 'make bench TOPIC=vmm|protect|restore|warm-cache|faults|os|host|cluster|move|libvirt|store|metrics'
	@echo '                      measure against the peers (QUICK=1: within 8 minutes; ONLY="case": only that;'
	@echo '                      TRIAL=1: only check that every case works)'
	@echo 'make campaign NAME=overhead|coverage|penalty-disk|penalty-protect'
	@echo '                      run a designed experiment of ours (TRIAL=1: one run a level)'
	@echo 'make lint | unit | guests | host | cluster | lab | benches   parts of make test'
	@echo 'make package          check the Debian package on Debian 12 and 13'

build:
	cargo build --release --locked

DESTDIR =
PREFIX = /usr/local
BINARY = target/release/rekindle

install:
	scripts/install "$(BINARY)" "$(DESTDIR)" "$(PREFIX)"

deb rpm: build
	scripts/package $@ "$${CARGO_TARGET_DIR:-target}/release/rekindle"

demo:
	scripts/demo

demo-cluster:
	scripts/demo-cluster

test:
	scripts/test

lint unit guests host cluster package lab benches:
	scripts/test $@

bench:
	scripts/bench "$(TOPIC)"

campaign:
	scripts/campaign $(NAME)

book:
	scripts/book

clean:
	cargo clean
