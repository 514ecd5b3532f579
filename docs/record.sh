#!/usr/bin/env bash
# What `make recording` records: the lab's hosts train while a worker and a parameter server are killed.
set -uo pipefail

type_and_run() {
    printf '\033[32m$\033[0m '
    for ((at = 0; at < ${#1}; at++)); do
        printf '%s' "${1:at:1}"
        sleep 0.03
    done
    printf '\n'
    eval "$1"
    printf '\n'
    sleep 2
}

type_and_run "fab start-cluster --run recorded-$(date +%H%M%S) --detach"
type_and_run 'fab status'
type_and_run 'fab stop-cluster'
type_and_run 'fab drill worker,ps'
