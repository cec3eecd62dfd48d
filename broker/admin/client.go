package admin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/hermes-reach/hermes-reach/internal/localsock"
)

// client asks a running broker.
type client struct{ http *http.Client }

func newClient(socket string) *client {
	c := localsock.Client(socket)
	c.Timeout = 2 * ioTimeout
	return &client{http: c}
}

func (c *client) close() error {
	c.http.CloseIdleConnections()
	return nil
}

func (c *client) add(ctx context.Context, r addRequest) (Host, error) {
	return ask[Host](ctx, c, "add", r)
}

func (c *client) rotate(ctx context.Context, r rotateRequest) (Host, error) {
	return ask[Host](ctx, c, "rotate", r)
}

func (c *client) remove(ctx context.Context, r removeRequest) (Host, error) {
	return ask[Host](ctx, c, "remove", r)
}

func (c *client) list(ctx context.Context) ([]Host, error) {
	return ask[[]Host](ctx, c, "list", struct{}{})
}

// ask makes one request.
func ask[Res any](ctx context.Context, c *client, what string, req any) (Res, error) {
	var res Res
	body, err := json.Marshal(req)
	if err != nil {
		return res, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://broker/v1/"+what, bytes.NewReader(body))
	if err != nil {
		return res, err
	}
	answer, err := c.http.Do(r)
	if err != nil {
		return res, fmt.Errorf("ask the running broker: %w", err)
	}
	defer func() { _ = answer.Body.Close() }()
	got, err := io.ReadAll(io.LimitReader(answer.Body, maxAnswer+1))
	switch {
	case err != nil:
		return res, fmt.Errorf("ask the running broker: %w", err)
	case len(got) > maxAnswer:
		return res, fmt.Errorf("the running broker's answer is longer than %d bytes", maxAnswer)
	case answer.StatusCode != http.StatusOK:
		return res, refused(answer.Status, got)
	}
	if err := json.Unmarshal(got, &res); err != nil {
		return res, fmt.Errorf("the running broker's answer does not parse: %w", err)
	}
	return res, nil
}

// refused is the broker's no as an error that errors.Is knows.
func refused(status string, body []byte) error {
	var r refusal
	if err := json.Unmarshal(body, &r); err != nil || r.Message == "" {
		return fmt.Errorf("the running broker answers %s: is it of another version?", status)
	}
	if kind := kinds[r.Code]; kind != nil {
		return &remoteError{r.Message, kind}
	}
	return errors.New(r.Message)
}

// A remoteError says what the broker said and is what it meant.
type remoteError struct {
	message string
	kind    error
}

func (e *remoteError) Error() string { return e.message }
func (e *remoteError) Unwrap() error { return e.kind }
