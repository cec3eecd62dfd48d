package host

import (
	"context"
	"net"

	"github.com/hermes-reach/hermes-reach/reach/wire"
	"github.com/hermes-reach/hermes-reach/securelink/session"
)

// What the tests of this package see of its inside. They stand outside it,
// because the operator whom they play imports it.
var (
	LoadSecret      = loadSecret
	NextEpoch       = nextEpoch
	CheckAdvertise  = checkAdvertise
	ThisMachineOnly = thisMachineOnly
	WriteFile       = writeFile
	MaxScanned      = maxScanned
)

func Advertised(named []string, listeners []net.Listener) []string {
	return advertised(named, listeners)
}

func RouteToken(secret []byte, broker wire.BrokerURL, credential string) string {
	return (&routes{secret: secret}).token(broker, credential)
}

func (h *Host) CodeEnded(end session.CodeEnd) { h.codeEnded(end) }

func (h *Host) Issue(ctx context.Context, req session.RouteRequest) ([]session.RouteCredential, error) {
	return h.routes.Issue(ctx, req)
}

func (h *Host) Withdraw(ctx context.Context, credential string) error {
	return h.routes.Withdraw(ctx, credential)
}
