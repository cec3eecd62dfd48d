package carrier

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/coder/websocket"

	"github.com/hermes-reach/hermes-reach/reach/carrier/outer"
)

// Upgrade turns a request for ConnectPath into a carrier, by whichever of the
// transports tls and wss the client asks for. On an error the answer has been
// written. The request's query and credentials are the caller's to refuse.
func Upgrade(w http.ResponseWriter, r *http.Request) (*Carrier, error) {
	if r.Method == http.MethodGet && headerHas(r.Header, "Connection", "upgrade") &&
		headerHas(r.Header, "Upgrade", UpgradeToken) {
		return upgradeTLS(w)
	}
	if headerHas(r.Header, "Upgrade", "websocket") {
		return upgradeWSS(w, r)
	}
	w.Header().Set("Upgrade", UpgradeToken+", websocket")
	http.Error(w, "this is a Reach broker: it speaks "+UpgradeToken+" and WebSocket here", http.StatusUpgradeRequired)
	return nil, errors.New("the request asks for no upgrade that a broker speaks")
}

func headerHas(h http.Header, name, token string) bool {
	for _, v := range h.Values(name) {
		for part := range strings.SplitSeq(v, ",") {
			if strings.EqualFold(strings.TrimSpace(part), token) {
				return true
			}
		}
	}
	return false
}

func upgradeTLS(w http.ResponseWriter) (*Carrier, error) {
	conn, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		http.Error(w, "upgrade needs HTTP/1.1", http.StatusHTTPVersionNotSupported)
		return nil, fmt.Errorf("upgrade: %w", err)
	}
	// The server's deadlines were for the request; a session has its own.
	err = errors.Join(conn.SetDeadline(time.Time{}), write101(conn))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("answer the upgrade: %w", err), conn.Close())
	}
	return &Carrier{
		rw: &readerConn{drainFirst(rw.Reader, conn), &corked{conn, outer.Under(conn)}}, close: abruptClose(conn), transport: TLS,
		local: conn.LocalAddr(), remote: conn.RemoteAddr(),
	}, nil
}

func write101(conn net.Conn) error {
	_, err := conn.Write([]byte("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: " +
		UpgradeToken + "\r\n\r\n"))
	return err
}

func upgradeWSS(w http.ResponseWriter, r *http.Request) (*Carrier, error) {
	if !headerHas(r.Header, "Sec-WebSocket-Protocol", Subprotocol) {
		http.Error(w, "the WebSocket subprotocol must be "+Subprotocol, http.StatusBadRequest)
		return nil, fmt.Errorf("upgrade: subprotocol %q is not offered", Subprotocol)
	}
	if r.Header.Get("Origin") != "" {
		http.Error(w, "browsers have no business here", http.StatusForbidden)
		return nil, errors.New("upgrade: the request has an Origin")
	}
	var conn net.Conn
	ws, err := websocket.Accept(&hijackSpy{ResponseWriter: w, got: &conn}, r, &websocket.AcceptOptions{
		Subprotocols:    []string{Subprotocol},
		CompressionMode: websocket.CompressionDisabled,
	})
	if err != nil {
		return nil, fmt.Errorf("upgrade: %w", err)
	}
	return newWSCarrier(ws, conn)
}
