package hermesagent

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"time"
)

const (
	twoRequests = "POST /v1/chat HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}" +
		"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
	firstEvents  = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: a\n\n\r\n"
	secondEvents = "9\r\ndata: b\n\n\r\n"
	theRest      = "0\r\n\r\nHTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno"
)

// However TCP cuts the bytes, the same events come out, each with the time of the
// piece that its last byte came in.
func TestExchangesAtEveryCut(t *testing.T) {
	up := []piece{{data: []byte(twoRequests)}}
	down := firstEvents + secondEvents + theRest
	endOfA := strings.Index(down, "data: a\n\n") + len("data: a\n\n")
	endOfB := strings.Index(down, "data: b\n\n") + len("data: b\n\n")
	before, after := time.UnixMilli(1), time.UnixMilli(2)
	at := func(end, cut int) time.Time {
		if end <= cut {
			return before
		}
		return after
	}
	for cut := range len(down) + 1 {
		pieces := []piece{{at: before, data: []byte(down[:cut])}, {at: after, data: []byte(down[cut:])}}
		got := exchanges(up, pieces)
		want := []Exchange{
			{Method: "POST", Path: "/v1/chat", Status: 200, Complete: true, Events: []Event{
				{Text: "data: a", At: at(endOfA, cut)}, {Text: "data: b", At: at(endOfB, cut)}}},
			{Method: "GET", Path: "/health", Status: 404, Complete: true, Body: []byte("no")},
		}
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("cut at %d: got %+v, want %+v", cut, got, want)
		}
		if string(pieces[0].data) != down[:cut] {
			t.Fatal("reading has changed what is remembered")
		}
	}
}

// What has not come yet is not made up.
func TestExchangesUnderWay(t *testing.T) {
	up := []piece{{data: []byte(twoRequests)}}
	for name, tt := range map[string]struct {
		down     string
		status   int
		events   int
		complete bool
	}{
		"no response":      {"", 0, 0, false},
		"half a head":      {firstEvents[:40], 0, 0, false},
		"one event of two": {firstEvents, 200, 1, false},
		"not ended":        {firstEvents + secondEvents, 200, 2, false},
		"ended":            {firstEvents + secondEvents + "0\r\n\r\n", 200, 2, true},
	} {
		got := exchanges(up, []piece{{data: []byte(tt.down)}})
		if len(got) == 0 || got[0].Status != tt.status || len(got[0].Events) != tt.events || got[0].Complete != tt.complete {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// The tap stamps what the server sends when the server sends it, also when the
// client does not read.
func TestTapStampsTheServer(t *testing.T) {
	finish := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "data: a\n\ndata: b\n\n")
		w.(http.Flusher).Flush()
		select {
		case <-finish:
		case <-r.Context().Done():
		}
		io.WriteString(w, "data: c\n\n")
	}))
	defer server.Close()
	tap, err := StartTap(t.Context(), server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer tap.Close()
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	resp, err := (&http.Client{Transport: transport}).Get(tap.URL().JoinPath("x").String())
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	pace := time.NewTicker(time.Millisecond)
	defer pace.Stop()
	for len(events1(t, tap)) < 2 { // the client has read nothing of the body yet
		<-pace.C
	}
	reading := time.Now()
	close(finish)
	var seen []Event
	for e, err := range ReadEvents(resp.Body) {
		if err != nil {
			t.Fatal(err)
		}
		seen = append(seen, e)
	}
	sent := events1(t, tap)
	added, err := Delays(sent, seen)
	if err != nil || len(added) != 3 {
		t.Fatalf("%d events at both ends, %v", len(added), err)
	}
	for i := range 2 {
		if !sent[i].At.Before(reading) || seen[i].At.Before(reading) {
			t.Errorf("event %d: sent %v and seen %v after reading began", i, sent[i].At.Sub(reading), seen[i].At.Sub(reading))
		}
	}
}

// events1 are the events of the only exchange.
func events1(t *testing.T, tap *Tap) []Event {
	t.Helper()
	got, err := tap.Exchanges()
	if err != nil {
		t.Fatal(err)
	}
	if len(got) == 0 {
		return nil
	}
	return got[0].Events
}

// A TCP relay that is more than a pipe would change what is measured.
func TestTapIsTransparent(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	payload := bytes.Repeat([]byte("0123456789abcdef"), 1<<15)
	echoed := make(chan error, 1)
	go func() { // reads to the end of the client's half, then answers on its own
		c, err := ln.Accept()
		if err != nil {
			echoed <- err
			return
		}
		defer c.Close()
		b, err := io.ReadAll(c)
		if err == nil {
			_, err = c.Write(b)
		}
		echoed <- err
	}()
	tap, err := StartTap(t.Context(), ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer tap.Close()
	c, err := net.Dial("tcp", tap.URL().Host)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write(payload); err != nil {
		t.Fatal(err)
	}
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(c)
	if err != nil || !bytes.Equal(got, payload) {
		t.Errorf("%d bytes came back of %d, %v", len(got), len(payload), err)
	}
	if err := <-echoed; err != nil {
		t.Error(err)
	}
}

func TestTapStaysOnLoopback(t *testing.T) {
	for _, target := range []string{"192.0.2.1:80", "example.com:80", "127.0.0.1"} {
		if tap, err := StartTap(t.Context(), target); err == nil {
			tap.Close()
			t.Errorf("a tap of %s", target)
		}
	}
}

// The control: a path that keeps events back is seen to do so. Were it not, no
// test with a tap would show anything.
func TestTapShowsAPathThatBuffers(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		pace := time.NewTicker(20 * time.Millisecond)
		defer pace.Stop()
		for _, text := range []string{"a", "b", "c", "d"} {
			io.WriteString(w, "data: "+text+"\n\n")
			w.(http.Flusher).Flush()
			<-pace.C
		}
	}))
	defer server.Close()
	tap, err := StartTap(t.Context(), server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer tap.Close()
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	resp, err := (&http.Client{Transport: transport}).Get(tap.URL().String() + "/")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	kept, err := io.ReadAll(resp.Body) // the path: it hands on when it has everything
	if err != nil {
		t.Fatal(err)
	}
	var seen []Event
	for e, err := range ReadEvents(bytes.NewReader(kept)) {
		if err != nil {
			t.Fatal(err)
		}
		seen = append(seen, e)
	}
	added, err := Delays(events1(t, tap), seen)
	if err != nil || len(added) != 4 {
		t.Fatalf("%v, %v", added, err)
	}
	if added[0] < 50*time.Millisecond || added[0] < added[3] {
		t.Errorf("the first of four events was kept for three times 20 ms, and this shows: %v", added)
	}
}
