package admin

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hermes-reach/hermes-reach/broker/store"
)

func testHandler(t testing.TB) http.Handler {
	s, err := store.Open(filepath.Join(t.TempDir(), "broker.db"), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return handler(&local{store: s})
}

const goodAdd = `{"name":"home","host_id":"AAAAAAAAAAAAAAAAAAAAAQ","token_sha256":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAE"}`

func post(h http.Handler, path, body string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, path, strings.NewReader(body)))
	return w
}

func TestRequestsAreBoundedAndExact(t *testing.T) {
	for name, tt := range map[string]struct {
		path, body string
		want       int
	}{
		"nothing":         {"/v1/add", "", 400},
		"no object":       {"/v1/add", `"home"`, 400},
		"unknown member":  {"/v1/add", strings.Replace(goodAdd, "{", `{"admin":true,`, 1), 400},
		"two objects":     {"/v1/add", goodAdd + goodAdd, 400},
		"short id":        {"/v1/add", strings.Replace(goodAdd, "AAQ", "Q", 1), 400},
		"no canonical id": {"/v1/add", strings.Replace(goodAdd, "AAQ", "AAR", 1), 400},
		"oversized":       {"/v1/add", `{"name":"` + strings.Repeat("x", maxRequest) + `"}`, 400},
		"oversized space": {"/v1/add", strings.Repeat(" ", maxRequest) + goodAdd, 400},
		"unknown path":    {"/v1/other", "{}", 404},
		"not there":       {"/v1/remove", `{"name":"nobody"}`, 409},
		"good":            {"/v1/add", goodAdd, 200},
	} {
		t.Run(name, func(t *testing.T) {
			if w := post(testHandler(t), tt.path, tt.body); w.Code != tt.want {
				t.Errorf("answered %d %s, want %d", w.Code, w.Body, tt.want)
			}
		})
	}
	w := httptest.NewRecorder()
	testHandler(t).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/v1/list", nil))
	if w.Code != http.StatusMethodNotAllowed {
		t.Errorf("GET answered %d", w.Code)
	}
}

// TestAnswersHoldNoDigest: what an operator sees opens nothing.
func TestAnswersHoldNoDigest(t *testing.T) {
	h := testHandler(t)
	all := post(h, "/v1/add", goodAdd).Body.String() + post(h, "/v1/list", "{}").Body.String()
	if !strings.Contains(all, `"home"`) || strings.Contains(all, "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAE") {
		t.Errorf("answers: %s", all)
	}
}

// TestSocketOfOthersIsRefused before anything is asked there.
func TestSocketOfOthersIsRefused(t *testing.T) {
	for name, tt := range map[string]struct {
		make func(t *testing.T, place string)
		want string
	}{
		"open to others": {func(t *testing.T, place string) { listen(t, place, 0o660) }, "other users"},
		"a file":         {func(_ *testing.T, place string) { _ = os.WriteFile(place, nil, 0o600) }, "not a socket"},
		"a link": {func(t *testing.T, place string) {
			listen(t, place+"2", 0o600)
			_ = os.Symlink(place+"2", place)
		}, "not a socket"},
	} {
		t.Run(name, func(t *testing.T) {
			state := filepath.Join(t.TempDir(), "b.db")
			tt.make(t, state+".sock")
			if a, err := Open(state); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Open = %v, %v; want a refusal that says %q", a, err, tt.want)
			}
		})
	}
}

func listen(t *testing.T, place string, mode fs.FileMode) {
	t.Helper()
	ln, err := net.Listen("unix", place)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	if err := os.Chmod(place, mode); err != nil {
		t.Fatal(err)
	}
}

// foreign is a socket as another user's would be.
type foreign struct{ fs.FileInfo }

func (foreign) Sys() any { return nil }

func TestSocketOfAnotherUser(t *testing.T) {
	place := filepath.Join(t.TempDir(), "s")
	listen(t, place, 0o600)
	info, err := os.Lstat(place)
	if err != nil {
		t.Fatal(err)
	}
	if err := ours(info); err != nil {
		t.Errorf("our own socket: %v", err)
	}
	if err := ours(foreign{info}); err == nil || !strings.Contains(err.Error(), "another user") {
		t.Errorf("a socket whose owner is not us: %v, want a refusal", err)
	}
	if os.Geteuid() != 0 {
		return // only root can make one that really is another's
	}
	if err := os.Lchown(place, 12345, 12345); err != nil {
		t.Fatal(err)
	}
	if _, err := answers(t.Context(), place); err == nil {
		t.Error("another user's socket is used")
	}
}

func TestErrorsKeepTheirMeaning(t *testing.T) {
	for code, kind := range kinds {
		err := refused("409", []byte(`{"code":"`+code+`","message":"what happened"}`))
		if !errors.Is(err, kind) || err.Error() != "what happened" {
			t.Errorf("%s: %v", code, err)
		}
	}
	for _, body := range []string{"", "<html>", "{}", `{"message":""}`} {
		if err := refused("502 Bad Gateway", []byte(body)); err == nil || !strings.Contains(err.Error(), "502") {
			t.Errorf("%q: %v", body, err)
		}
	}
}

// FuzzRequest: no request does more than add the host that it names.
func FuzzRequest(f *testing.F) {
	f.Add(goodAdd)
	f.Add(`{"name":"x"}`)
	f.Fuzz(func(t *testing.T, body string) {
		req, err := decodeRequest[addRequest](strings.NewReader(body))
		if err != nil {
			return
		}
		s, err := store.Open(filepath.Join(t.TempDir(), "broker.db"), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = s.Close() }()
		_, err = (&local{store: s}).add(context.Background(), req)
		hosts, lerr := s.Hosts()
		if lerr != nil || (err == nil) != (len(hosts) == 1) {
			t.Errorf("add = %v, and then %d hosts, %v", err, len(hosts), lerr)
		}
	})
}
