package link

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// registerTimeout bounds the wait for the answer to a registration.
const registerTimeout = 10 * time.Second

// Register opens the session's first stream, registers on it and makes it the
// control stream. A broker's no is a *wire.RefusedError.
func (s *Session) Register(ctx context.Context, reg *wire.Register) (*Control, *wire.Registered, error) {
	st, err := s.OpenStream(ctx)
	if err != nil {
		return nil, nil, fmt.Errorf("register: %w", err)
	}
	defer context.AfterFunc(ctx, func() { st.Abort(wire.CodeClosed) })()
	if err := wire.WriteMessage(st, reg); err != nil {
		return nil, nil, fmt.Errorf("register: %w", err)
	}
	m, err := ReadHeader(st, registerTimeout)
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, nil, fmt.Errorf("register: %w", noEOF(err))
	}
	switch m := m.(type) {
	case *wire.Registered:
		return s.StartControl(st), m, nil
	case *wire.Error:
		return nil, nil, fmt.Errorf("register: %w", m.Refused())
	}
	return nil, nil, errors.New("register: the broker answered with something else")
}

// noEOF keeps an end that came too early from passing for a proper one.
func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// ReadHeader reads the header message of a stream, for at most d.
func ReadHeader(st *Stream, d time.Duration) (wire.Message, error) {
	if err := st.SetReadDeadline(time.Now().Add(d)); err != nil {
		return nil, err
	}
	m, err := wire.ReadMessage(st)
	if err != nil {
		return nil, noEOF(err)
	}
	return m, st.SetReadDeadline(time.Time{})
}
