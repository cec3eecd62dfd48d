package main

import (
	"errors"

	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/internal/cli"
	"github.com/hermes-reach/hermes-reach/internal/host"
	"github.com/hermes-reach/hermes-reach/pins"
)

// classify gives the exit codes of errors that come from our own packages.
func classify(err error) int {
	if pins.IsTrust(err) {
		return cli.TrustRefused
	}
	if _, cannotBe := errors.AsType[*host.ConfigError](err); cannotBe || errors.Is(err, endpoints.ErrInvite) {
		return cli.WrongUsage
	}
	return 0
}
