package securelink

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/coder/websocket"
	"golang.org/x/net/http2/hpack"
)

func TestWebSockets(t *testing.T) {
	var origin, offered atomic.Value
	srv := service(t, func(w http.ResponseWriter, r *http.Request) {
		origin.Store(r.Header.Get("Origin"))
		offered.Store(r.Header.Get("Sec-Websocket-Extensions"))
		if r.URL.RawQuery != "ticket=a%3Ab" {
			t.Errorf("query %q", r.URL.RawQuery)
		}
		c, err := websocket.Accept(w, r, &websocket.AcceptOptions{Subprotocols: []string{"hermes.v1"}, CompressionMode: websocket.CompressionContextTakeover})
		if err != nil {
			t.Error(err)
			return
		}
		defer c.CloseNow()
		for {
			kind, data, err := c.Read(r.Context())
			if err != nil {
				return
			}
			if string(data) == "close" {
				c.Close(4001, "as you wish")
				return
			}
			if c.Write(r.Context(), kind, data) != nil {
				return
			}
		}
	})
	l := start(t, Config{Upstreams: Upstreams{API: srv.URL, Dashboard: srv.URL}})
	for _, ns := range []string{"api", "dashboard"} {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		c, resp, err := websocket.Dial(ctx, "wss://"+l.addr+"/"+ns+"/ws?ticket=a%3Ab", &websocket.DialOptions{
			HTTPClient: l.h1, Subprotocols: []string{"hermes.v1"}, CompressionMode: websocket.CompressionContextTakeover,
			HTTPHeader: http.Header{"Origin": {"https://" + l.addr}},
		})
		if err != nil {
			t.Fatal(ns, err)
		}
		defer c.CloseNow()
		if c.Subprotocol() != "hermes.v1" || resp.Header.Get("Sec-Websocket-Extensions") == "" || offered.Load() == "" {
			t.Errorf("%s: sub-protocol %q, extensions %q: they are end to end", ns, c.Subprotocol(), resp.Header.Get("Sec-Websocket-Extensions"))
		}
		if origin.Load() != srv.URL {
			t.Errorf("%s: the upstream saw Origin %v, itself is %s", ns, origin.Load(), srv.URL)
		}
		for i := range 10 {
			text := strings.Repeat(fmt.Sprint("message ", i, " "), 1000)
			if err := c.Write(ctx, websocket.MessageText, []byte(text)); err != nil {
				t.Fatal(err)
			}
			if _, got, err := c.Read(ctx); err != nil || string(got) != text {
				t.Fatalf("%s: %d bytes, %v", ns, len(got), err)
			}
		}
		c.Write(ctx, websocket.MessageText, []byte("close"))
		if _, _, err := c.Read(ctx); websocket.CloseStatus(err) != 4001 {
			t.Errorf("%s: close status %v", ns, err)
		}
	}
}

// Bytes that come along with the handshake belong to the stream; and the end of
// one direction is not the end of the other.
func TestUpgradeIsTransparent(t *testing.T) {
	srv := service(t, func(w http.ResponseWriter, r *http.Request) {
		c, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
		got, err := io.ReadAll(rw)
		fmt.Fprintf(c, "got %s %v", got, err)
	})
	l := start(t, Config{Upstreams: Upstreams{API: srv.URL}})
	c := l.dial(t)
	io.WriteString(c, "GET /api/ws HTTP/1.1\r\nHost: home.example\r\n"+handshakeLines+"\r\nearly ")
	r := bufio.NewReader(c)
	resp, err := http.ReadResponse(r, nil)
	if err != nil || resp.StatusCode != 101 {
		t.Fatalf("%+v, %v", resp, err)
	}
	io.WriteString(c, "late")
	c.CloseWrite()
	if got, err := io.ReadAll(r); err != nil || string(got) != "got early late <nil>" {
		t.Errorf("%q, %v", got, err)
	}
}

// What HTTP/2 promises: extended CONNECT is not among it, and the Host check
// holds for :authority, too.
func TestHTTP2(t *testing.T) {
	l := start(t, Config{})
	cfg := l.tls()
	cfg.NextProtos = []string{"h2"}
	raw, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", l.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	c := tlsClient(t, raw, cfg)
	io.WriteString(c, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
	c.Write(frame(frameSettings, 0, 0, nil))
	ask := func(id uint32, fields ...string) {
		var b bytes.Buffer
		e := hpack.NewEncoder(&b)
		for i := 0; i < len(fields); i += 2 {
			e.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1]})
		}
		c.Write(frame(frameHeaders, 0x5, id, b.Bytes())) // END_STREAM, END_HEADERS
	}
	base := []string{":method", "GET", ":scheme", "https", ":path", "/relay/health"}
	ask(1, append(base, ":authority", "home.example")...)
	ask(3, append(base, ":authority", "away.example")...)
	ask(5, append(base, ":authority", "home.example", "host", "away.example")...)
	ask(7, append(base, "host", "home.example")...)
	ask(9, base...)
	want := map[uint32]string{1: "200", 3: "421", 5: "400", 7: "200", 9: "400"}
	dec := hpack.NewDecoder(4096, nil)
	for len(want) > 0 {
		var head [9]byte
		if _, err := io.ReadFull(c, head[:]); err != nil {
			t.Fatalf("%v, still waiting for %v", err, want)
		}
		payload := make([]byte, int(head[0])<<16|int(head[1])<<8|int(head[2]))
		if _, err := io.ReadFull(c, payload); err != nil {
			t.Fatal(err)
		}
		id := binary.BigEndian.Uint32(head[5:])
		switch head[3] {
		case frameSettings:
			for ; len(payload) >= 6; payload = payload[6:] {
				if binary.BigEndian.Uint16(payload) == 0x8 && binary.BigEndian.Uint32(payload[2:]) != 0 {
					t.Error("extended CONNECT is announced")
				}
			}
		case frameHeaders:
			fields, err := dec.DecodeFull(payload)
			if err != nil || fields[0].Value != want[id] {
				t.Errorf("stream %d: %v, %v; want %s", id, fields, err, want[id])
			}
			delete(want, id)
		}
	}
}

const (
	frameHeaders  = 0x1
	frameSettings = 0x4
)

// frame is one HTTP/2 frame.
func frame(kind, flags byte, stream uint32, payload []byte) []byte {
	n := len(payload)
	b := []byte{byte(n >> 16), byte(n >> 8), byte(n), kind, flags}
	return append(binary.BigEndian.AppendUint32(b, stream), payload...)
}
