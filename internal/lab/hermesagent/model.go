package hermesagent

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

// ModelName is the one model that the stub has.
const ModelName = "lab-model"

// maxModelRequest bounds what the stub reads of a request. The agent sends its
// whole system prompt and every tool's schema each time: some 100 KiB.
const maxModelRequest = 8 << 20

// ModelOptions sets the answer's length and pace; zero fields get the defaults.
type ModelOptions struct {
	Tokens   int           // tokens an answer, default 40, at most 999
	Interval time.Duration // from one token to the next, default 50 ms
}

// Model is an OpenAI-compatible model server on loopback that knows one answer,
// streams it slowly, and remembers when it let go of each token. Its methods
// may be called by many goroutines.
type Model struct {
	tokens   int
	interval time.Duration
	srv      *http.Server
	url      string
	served   sync.WaitGroup

	mu         sync.Mutex
	answers    [][]Sent
	unexpected []string
}

// Sent is one token of one answer.
type Sent struct {
	Token string    // unique in the life of a Model, for example "a2t017"
	At    time.Time // just before it was written, with a monotonic reading
}

// StartModel serves on a free port of 127.0.0.1 until Close; ctx only bounds the
// start.
func StartModel(ctx context.Context, o ModelOptions) (*Model, error) {
	if o.Tokens == 0 {
		o.Tokens = 40
	}
	if o.Interval == 0 {
		o.Interval = 50 * time.Millisecond
	}
	if o.Tokens < 1 || o.Tokens > 999 || o.Interval < 0 {
		return nil, fmt.Errorf("model stub: %d tokens every %v: want 1 to 999 tokens and a positive interval", o.Tokens, o.Interval)
	}
	ln, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("model stub: %w", err)
	}
	m := &Model{tokens: o.Tokens, interval: o.Interval, url: "http://" + ln.Addr().String() + "/v1"}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/models", m.models)
	mux.HandleFunc("POST /v1/chat/completions", m.complete)
	mux.HandleFunc("/", m.surprise)
	m.srv = &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	m.served.Go(func() { _ = m.srv.Serve(ln) }) // always ErrServerClosed: Close is the only way out
	return m, nil
}

// URL is what an OpenAI client calls its base URL; it ends in /v1.
func (m *Model) URL() string { return m.url }

// Answers returns, for each completion asked of the stub so far and in the
// order of asking, the tokens sent. The agent asks for more than the user's
// answer (a title for the session, for one): find yours by its tokens.
func (m *Model) Answers() [][]Sent {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([][]Sent, len(m.answers))
	for i, a := range m.answers {
		out[i] = slices.Clone(a)
	}
	return out
}

// SentAt returns when a token was sent, and whether it ever was.
func (m *Model) SentAt(token string) (time.Time, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, a := range m.answers {
		for _, s := range a {
			if s.Token == token {
				return s.At, true
			}
		}
	}
	return time.Time{}, false
}

// Unexpected lists requests that the stub has no answer for, as METHOD PATH.
func (m *Model) Unexpected() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.unexpected)
}

// Close cuts what is under way and returns when nothing of the stub is left.
func (m *Model) Close() error {
	err := m.srv.Close()
	m.served.Wait()
	return err
}

func (m *Model) surprise(w http.ResponseWriter, r *http.Request) {
	m.mu.Lock()
	m.unexpected = append(m.unexpected, r.Method+" "+r.URL.Path)
	m.mu.Unlock()
	http.NotFound(w, r)
}

func (m *Model) models(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, map[string]any{"object": "list", "data": []any{
		// The agent refuses models with a small context, and looks for its
		// size on the internet where the list does not say it.
		map[string]any{"id": ModelName, "object": "model", "owned_by": "lab", "context_length": 131072},
	}})
}

func (m *Model) complete(w http.ResponseWriter, r *http.Request) {
	var req struct {
		Stream bool `json:"stream"`
	}
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxModelRequest)).Decode(&req); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	m.mu.Lock()
	n := len(m.answers)
	m.answers = append(m.answers, nil)
	m.mu.Unlock()
	if req.Stream {
		m.stream(r.Context(), w, n)
		return
	}
	var text strings.Builder
	for i := range m.tokens {
		text.WriteString(m.record(n, i) + " ")
	}
	writeJSON(w, m.envelope(n, "chat.completion", map[string]any{
		"index": 0, "finish_reason": "stop",
		"message": map[string]any{"role": "assistant", "content": text.String()},
	}, true))
}

// stream answers with one server-sent event a token, each flushed by itself.
func (m *Model) stream(ctx context.Context, w http.ResponseWriter, n int) {
	out := http.NewResponseController(w)
	w.Header().Set("Content-Type", "text/event-stream")
	send := func(delta map[string]any, finish any, usage bool) error {
		b, err := json.Marshal(m.envelope(n, "chat.completion.chunk",
			map[string]any{"index": 0, "delta": delta, "finish_reason": finish}, usage))
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintf(w, "data: %s\n\n", b); err != nil {
			return err
		}
		return out.Flush()
	}
	pace := time.NewTicker(m.interval)
	defer pace.Stop()
	if send(map[string]any{"role": "assistant", "content": ""}, nil, false) != nil {
		return // the agent has gone, and says so itself
	}
	for i := range m.tokens {
		select {
		case <-pace.C:
		case <-ctx.Done():
			return
		}
		if send(map[string]any{"content": m.record(n, i) + " "}, nil, false) != nil {
			return
		}
	}
	if send(map[string]any{}, "stop", true) == nil {
		fmt.Fprint(w, "data: [DONE]\n\n")
	}
}

// record notes that token i of answer n is about to be sent, and returns it.
func (m *Model) record(n, i int) string {
	token := fmt.Sprintf("a%dt%03d", n, i)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.answers[n] = append(m.answers[n], Sent{Token: token, At: time.Now()})
	return token
}

func (m *Model) envelope(n int, object string, choice map[string]any, usage bool) map[string]any {
	e := map[string]any{
		"id": fmt.Sprintf("lab-%d", n), "object": object, "created": time.Now().Unix(),
		"model": ModelName, "choices": []any{choice},
	}
	if usage {
		e["usage"] = map[string]any{"prompt_tokens": 1, "completion_tokens": m.tokens, "total_tokens": m.tokens + 1}
	}
	return e
}

func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // the agent has gone, and says so itself
}
