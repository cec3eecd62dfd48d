package main

import (
	"github.com/hermes-reach/hermes-reach/internal/cli"
	"github.com/hermes-reach/hermes-reach/pins"
)

// classify gives the exit codes of errors that come from our own packages.
func classify(err error) int {
	if pins.IsTrust(err) {
		return cli.TrustRefused
	}
	return 0
}
