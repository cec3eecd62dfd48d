package host_test

import (
	"io"
	"maps"
	"net/http"
	"strings"
	"testing"

	"github.com/hermes-reach/hermes-reach/internal/host"
	"github.com/hermes-reach/hermes-reach/internal/localsock"
)

// raw asks the control socket as a program that is not ours would.
func raw(t *testing.T, s *site, method, path, body string, header http.Header) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, "http://host"+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	maps.Copy(req.Header, header)
	res, err := localsock.Client(host.ControlPath(s.dir)).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	answer, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, string(answer)
}

// TestControlIsForTheOwnerAlone: what a browser or a proxy sends is refused
// before anything happens.
func TestControlIsForTheOwnerAlone(t *testing.T) {
	s := newSite(t)
	s.start()
	if status, _ := raw(t, s, http.MethodGet, "/status", "", nil); status != http.StatusOK {
		t.Fatalf("a plain request: %d", status)
	}
	for _, name := range []string{"Origin", "Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Forwarded-Prefix", "Sec-Fetch-Site", "Sec-Fetch-Mode"} {
		for _, value := range []string{"x", ""} {
			if status, _ := raw(t, s, http.MethodPost, "/pair", "{}", http.Header{name: {value}}); status != http.StatusForbidden {
				t.Errorf("with %s: %q answered %d, want 403", name, value, status)
			}
		}
	}
}

// TestControlReadsStrictly: nothing beyond the bounds, nothing it does not know.
func TestControlReadsStrictly(t *testing.T) {
	s := newSite(t)
	s.start()
	if _, answer := raw(t, s, http.MethodPost, "/pair", `{"ttl":"`+strings.Repeat("1", 70<<10)+`"}`, nil); !strings.Contains(answer, "too large") {
		t.Errorf("a body of 70 KiB: %.200s, want too large", answer)
	}
	for name, body := range map[string]string{
		"too large":           `{"ttl":"` + strings.Repeat("1", 70<<10) + `"}`,
		"an unknown member":   `{"ttl":"1d","admin":true}`,
		"a wrong type":        `{"ttl":1}`,
		"two objects":         `{} {}`,
		"no JSON":             `ttl=1d`,
		"nothing":             ``,
		"something behind it": `{}x`,
	} {
		status, answer := raw(t, s, http.MethodPost, "/pair", body, nil)
		if status != http.StatusUnprocessableEntity || !strings.Contains(answer, `"error"`) || strings.Contains(answer, "hermes-relay:") || len(answer) > 1000 {
			t.Errorf("%s: %d %.200s, want 422 and a short error", name, status, answer)
		}
	}
	if devices, err := s.op.Devices(t.Context()); err != nil || len(devices) != 0 {
		t.Errorf("devices = %v, %v", devices, err)
	}
	for path, want := range map[string]int{"/": http.StatusNotFound, "/pair": http.StatusMethodNotAllowed, "/debug/pprof/": http.StatusNotFound} {
		if status, _ := raw(t, s, http.MethodGet, path, "", nil); status != want {
			t.Errorf("GET %s: %d, want %d", path, status, want)
		}
	}
}

// TestDevicesByTheOperator lists, shows, shortens and revokes.
func TestDevicesByTheOperator(t *testing.T) {
	s := newSite(t)
	s.start()
	s.join(s.pair(host.PairRequest{}), "")
	id := s.id()
	d, err := s.op.Device(t.Context(), id[:4])
	if err != nil || d.ID != id || d.Name != "laptop" {
		t.Errorf("Device(%s) = %+v, %v", id[:4], d, err)
	}
	if short, err := s.op.Shorten(t.Context(), id, host.PairRequest{TTL: "1h"}); err != nil || !short.Expires.Before(d.Expires) {
		t.Errorf("Shorten = %v, %v; want an earlier end than %v", short.Expires, err, d.Expires)
	}
	for what, err := range map[string]error{
		"an increase":       second(s.op.Shorten(t.Context(), id, host.PairRequest{TTL: "90d"})),
		"nothing":           second(s.op.Shorten(t.Context(), id, host.PairRequest{})),
		"a short id":        second(s.op.Device(t.Context(), id[:2])),
		"an unknown device": second(s.op.Revoke(t.Context(), "0000000000000000")),
		"a path as an id":   second(s.op.Device(t.Context(), "../status")),
	} {
		if err == nil {
			t.Errorf("%s was taken", what)
		}
	}
	if gone, err := s.op.Revoke(t.Context(), id); err != nil || gone.ID != id {
		t.Errorf("Revoke = %+v, %v", gone, err)
	}
	if devices, err := s.op.Devices(t.Context()); err != nil || len(devices) != 0 {
		t.Errorf("devices after the revocation: %v, %v", devices, err)
	}
}

func second[T any](_ T, err error) error { return err }
