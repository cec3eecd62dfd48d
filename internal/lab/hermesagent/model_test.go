package hermesagent

import (
	"context"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
)

func startModel(t *testing.T, o ModelOptions) (*Model, *http.Client) {
	t.Helper()
	m, err := StartModel(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{}
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m, &http.Client{Transport: transport}
}

func TestModelStreams(t *testing.T) {
	m, client := startModel(t, ModelOptions{Tokens: 5, Interval: 10 * time.Millisecond})
	resp, err := client.Post(m.URL()+"/chat/completions", "application/json", strings.NewReader(`{"stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var tokens []string
	for e, err := range ReadEvents(resp.Body) {
		if err != nil {
			t.Fatal(err)
		}
		_, after, ok := strings.Cut(e.Text, `"content":"a`)
		if !ok {
			continue
		}
		token := "a" + after[:strings.Index(after, " ")]
		tokens = append(tokens, token)
		if sent, ok := m.SentAt(token); !ok || sent.After(e.At) {
			t.Errorf("%s: sent %v, seen %v", token, sent, e.At)
		}
	}
	if want := []string{"a0t000", "a0t001", "a0t002", "a0t003", "a0t004"}; !slices.Equal(tokens, want) {
		t.Errorf("streamed %q, want %q", tokens, want)
	}
	sent := m.Answers()
	if len(sent) != 1 || len(sent[0]) != 5 {
		t.Fatalf("remembers %v", sent)
	}
	if took := sent[0][4].At.Sub(sent[0][0].At); took < 20*time.Millisecond {
		t.Errorf("five tokens every 10 ms took only %v", took)
	}
	if _, ok := m.SentAt("a1t000"); ok {
		t.Error("knows a token that was never sent")
	}
}

func TestModelAnswersWhole(t *testing.T) {
	m, client := startModel(t, ModelOptions{Tokens: 2})
	resp, err := client.Post(m.URL()+"/chat/completions", "application/json", strings.NewReader(`{}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, err := io.ReadAll(resp.Body); err != nil || !strings.Contains(string(b), `"content":"a0t000 a0t001 "`) {
		t.Errorf("%s, %v", b, err)
	}
}

// Close must not wait for an answer that would go on for a minute.
func TestModelCloseCuts(t *testing.T) {
	m, client := startModel(t, ModelOptions{Tokens: 999, Interval: time.Minute})
	resp, err := client.Post(m.URL()+"/chat/completions", "application/json", strings.NewReader(`{"stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	if _, err := io.ReadAll(resp.Body); err == nil {
		t.Error("a cut answer looks like a whole one")
	}
}

func TestModelRemembersSurprises(t *testing.T) {
	m, client := startModel(t, ModelOptions{})
	for _, path := range []string{"/models", "/embeddings"} {
		req, err := http.NewRequestWithContext(context.Background(), http.MethodGet, m.URL()+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
	}
	if got, want := m.Unexpected(), []string{"GET /v1/embeddings"}; !slices.Equal(got, want) {
		t.Errorf("unexpected %q, want %q", got, want)
	}
}

func TestModelOptions(t *testing.T) {
	for _, o := range []ModelOptions{{Tokens: -1}, {Tokens: 1000}, {Interval: -1}} {
		if m, err := StartModel(t.Context(), o); err == nil {
			m.Close()
			t.Errorf("%+v is accepted", o)
		}
	}
}
