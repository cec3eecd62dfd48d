package securelink

import (
	"context"
	"crypto/rand"
	"crypto/sha1" //nolint:gosec // RFC 6455 asks for it, and it protects nothing
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path"
	"sync"
	"time"

	"github.com/hermes-reach/hermes-reach/securelink/session"
)

// serveRelay routes what is under /relay.
func (s *Server) serveRelay(w http.ResponseWriter, r *http.Request, peer Peer, rest string) {
	switch rest {
	case "/health":
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			refuse(w, refusing(http.StatusMethodNotAllowed, "method_not_allowed", "only GET and HEAD are served here", "Allow", "GET, HEAD"))
			return
		}
		s.serveHealth(w, r)
	case "/ws", "/session":
		if bad := relayHandshake(r); bad != nil {
			refuse(w, bad)
			return
		}
		if rest == "/ws" && s.relay != nil {
			s.bridgeRelay(w, r, peer)
			return
		}
		if s.conf.Sessions == nil {
			refuse(w, refusing(http.StatusServiceUnavailable, "relay_unavailable", "this host keeps no sessions of its own"))
			return
		}
		s.conf.Sessions.ServeRelay(w, r, session.Peer{Source: peer.Session, Path: peer.Path, OriginChecked: true})
	default:
		refuse(w, notFound)
	}
}

// relayHandshake checks a WebSocket handshake to the relay, as whole as we can,
// because we answer it ourselves.
func relayHandshake(r *http.Request) *refusal {
	if r.Method != http.MethodGet {
		return refusing(http.StatusMethodNotAllowed, "method_not_allowed", "this path is a WebSocket", "Allow", "GET")
	}
	upgrade, bad := wantsUpgrade(r)
	if bad != nil {
		return bad
	}
	if !upgrade {
		return badRequest("upgrade_required", "this path is a WebSocket")
	}
	if r.Header.Get("Sec-Websocket-Version") != "13" {
		return refusing(http.StatusUpgradeRequired, "bad_upgrade", "WebSocket version 13 is spoken here", "Sec-WebSocket-Version", "13")
	}
	if key, err := base64.StdEncoding.DecodeString(r.Header.Get("Sec-Websocket-Key")); err != nil || len(key) != 16 {
		return badRequest("bad_upgrade", "the WebSocket key is malformed")
	}
	if foreignOrigin(r) {
		return errOrigin
	}
	return nil
}

// Health is the answer of GET /relay/health. Apps in the field read its
// members: add, never remove.
type Health struct {
	Status       string             `json:"status"`
	Surface      string             `json:"surface"`
	DisplayName  string             `json:"display_name"`
	Description  string             `json:"description"`
	Security     string             `json:"security"`
	Capabilities []string           `json:"capabilities"`
	Namespaces   []string           `json:"namespaces"`
	Services     map[string]Service `json:"services"`
}

// Service is one namespace in a Health.
type Service struct {
	Supported      bool   `json:"supported"`
	Available      bool   `json:"available"`
	BasePath       string `json:"base_path"`
	HealthPath     string `json:"health_path,omitempty"`
	WebSocketPath  string `json:"websocket_path,omitempty"`
	Authentication string `json:"authentication"`
	Reason         string `json:"reason,omitempty"` // a code, when it is not available
}

func (s *Server) serveHealth(w http.ResponseWriter, r *http.Request) {
	h := Health{
		Status: "ok", Surface: "hermes_secure_proxy", DisplayName: "Hermes Secure Link",
		Description: "Pinned, end-to-end encrypted access to this Hermes host", Security: "pinned_tls",
		Capabilities: everywhere, Namespaces: everywhere, Services: map[string]Service{
			nsRelay:     {BasePath: "/relay", HealthPath: "/relay/health", WebSocketPath: "/relay/ws", Authentication: "relay_session"},
			nsAPI:       {BasePath: "/api", Authentication: "api_bearer"},
			nsDashboard: {BasePath: "/dashboard", Authentication: "dashboard_session"},
		},
	}
	for _, st := range s.Status(r.Context()).Namespaces {
		svc := h.Services[st.Name]
		svc.Supported, svc.Available, svc.Reason = true, st.Open, st.Code
		h.Services[st.Name] = svc
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	_ = json.NewEncoder(w).Encode(h)
}

// bridgeRelay joins a client to the loopback Relay. The handshake towards the
// Relay is our own, so that no client header crosses and no extension or
// sub-protocol is agreed on; frames then pass as they are.
func (s *Server) bridgeRelay(w http.ResponseWriter, r *http.Request, peer Peer) {
	back, bad := s.dialRelay(r.Context(), peer)
	if bad != nil {
		s.log.Info("relay not reached", "code", bad.code)
		refuse(w, bad)
		return
	}
	defer back.Close()
	out := writer{ResponseWriter: w, rc: http.NewResponseController(w)}
	front, rw, err := out.Hijack()
	if err != nil {
		refuse(w, refusing(http.StatusInternalServerError, "internal", "the connection cannot carry a WebSocket"))
		return
	}
	defer front.Close()
	_, _ = fmt.Fprintf(rw, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: %s\r\n\r\n",
		acceptKey(r.Header.Get("Sec-Websocket-Key")))
	if rw.Flush() != nil {
		return
	}
	join(front, back) // until one of the two ends; the server's Close ends front
}

// dialRelay opens a WebSocket to the Relay.
func (s *Server) dialRelay(ctx context.Context, peer Peer) (io.ReadWriteCloser, *refusal) {
	ctx, cancel := context.WithCancel(ctx)
	late := time.AfterFunc(s.conf.Limits.HeaderTime, cancel)
	defer late.Stop()
	up := s.relay
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+up.base.Host, nil)
	if err != nil {
		cancel()
		return nil, refusing(http.StatusInternalServerError, "internal", "the Relay's address cannot be used")
	}
	r.URL = upstreamURL(up.base, "", target{})
	if r.URL.Opaque == "" {
		r.URL.Opaque = "/ws"
	}
	var raw [16]byte
	_, _ = rand.Read(raw[:]) // never fails
	key := base64.StdEncoding.EncodeToString(raw[:])
	r.Header = http.Header{
		"Connection": {"Upgrade"}, "Upgrade": {"websocket"}, "User-Agent": {""},
		"Sec-Websocket-Version": {"13"}, "Sec-Websocket-Key": {key},
	}
	if s.conf.RelaySecret != "" {
		r.Header.Set("X-Hermes-Proxy-Secret", s.conf.RelaySecret)
		r.Header.Set("X-Hermes-Proxy-Peer", peerAddress(peer))
	}
	resp, err := up.fresh.RoundTrip(r)
	if err != nil {
		cancel()
		return nil, refusing(http.StatusBadGateway, "relay_unavailable", "the Relay on this host "+howDeaf(err))
	}
	back, ok := resp.Body.(io.ReadWriteCloser)
	h := resp.Header
	if resp.StatusCode == http.StatusSwitchingProtocols && ok && hasToken(h["Upgrade"], "websocket") &&
		h.Get("Sec-Websocket-Accept") == acceptKey(key) && h["Sec-Websocket-Extensions"] == nil && h["Sec-Websocket-Protocol"] == nil {
		return &relayConn{back, cancel}, nil
	}
	cancel()
	_ = resp.Body.Close()
	if resp.StatusCode == http.StatusTooManyRequests {
		// Apps in the field wait five minutes when they see this status.
		return nil, refusing(http.StatusTooManyRequests, "rate_limited", "the Relay refused: too many failed attempts", "Retry-After", "300")
	}
	return nil, refusing(http.StatusBadGateway, "relay_refused", fmt.Sprintf("the Relay on this host refused the WebSocket (status %d)", resp.StatusCode))
}

// relayConn frees its request when it is closed.
type relayConn struct {
	io.ReadWriteCloser
	cancel context.CancelFunc
}

func (c *relayConn) Close() error {
	defer c.cancel()
	return c.ReadWriteCloser.Close()
}

func (c *relayConn) CloseWrite() error {
	if half, ok := c.ReadWriteCloser.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return c.Close()
}

func howDeaf(err error) string {
	if nobodyListens(err) {
		return "is not running"
	}
	return "does not answer"
}

// acceptKey is RFC 6455's answer to a key. SHA-1 protects nothing here.
func acceptKey(key string) string {
	sum := sha1.Sum([]byte(key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11")) //nolint:gosec // as the RFC has it
	return base64.StdEncoding.EncodeToString(sum[:])
}

// join copies both ways until both are done or one fails. The end of one
// direction is passed on as such.
func join(a, b io.ReadWriteCloser) {
	var both sync.WaitGroup
	copyTo := func(dst, src io.ReadWriteCloser) {
		_, err := io.Copy(dst, src)
		if half, ok := dst.(interface{ CloseWrite() error }); ok && err == nil {
			err = half.CloseWrite()
		} else if err == nil {
			err = errors.ErrUnsupported
		}
		if err != nil {
			_ = a.Close()
			_ = b.Close()
		}
	}
	both.Go(func() { copyTo(a, b) })
	both.Go(func() { copyTo(b, a) })
	both.Wait()
}

// relayHealthPath is where a Relay with that WebSocket path tells its health.
func relayHealthPath(ws string) string {
	if ws == "" || ws == "/" {
		ws = "/ws"
	}
	return path.Join(path.Dir(ws), "health")
}
