package cli

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/term"
)

const (
	// MaxSecret bounds a secret that is read from a file or standard input.
	MaxSecret = 64 << 10
	maxRoots  = 4 << 20 // more than any system's collection of roots
)

// Secret resolves an argument that holds a secret: "-" stands for standard input
// and "@FILE" for the content of a file, without the newline at the end; anything
// else is the secret itself, which then stands in the shell's history. The result
// is not empty and at most [MaxSecret] long. Errors never repeat it.
func (a *App) Secret(arg string) (string, error) {
	text, err := a.secret(arg)
	if err != nil {
		return "", err
	}
	text = strings.TrimSuffix(strings.TrimSuffix(text, "\n"), "\r")
	if text == "" {
		return "", Usagef("%s is empty", source(arg))
	}
	return text, nil
}

func (a *App) secret(arg string) (string, error) {
	name, isFile := strings.CutPrefix(arg, "@")
	switch {
	case isFile:
		text, err := readFile(name, MaxSecret)
		return string(text), err
	case arg != "-":
		if len(arg) > MaxSecret {
			return "", Usagef("the argument is longer than %d bytes", MaxSecret)
		}
		return arg, nil
	case a.stdinTaken:
		return "", Usagef("standard input (-) can be used for one argument only")
	}
	a.stdinTaken = true
	if file, ok := a.Stdin.(*os.File); ok && term.IsTerminal(int(file.Fd())) {
		return a.pasted(file)
	}
	text, err := bounded(a.Stdin, MaxSecret)
	if err != nil {
		return "", fmt.Errorf("read standard input: %w", err)
	}
	return string(text), nil
}

// pasted reads one line from a terminal, unseen. The terminal's own line editor
// would cut a line at 4095 characters (on macOS at 1024), and an invite is longer.
func (a *App) pasted(tty *os.File) (text string, err error) {
	fmt.Fprintln(a.Stderr, "Paste it here and press Enter. It is not shown.")
	old, err := term.MakeRaw(int(tty.Fd()))
	if err != nil {
		return "", fmt.Errorf("read the terminal: %w", err)
	}
	defer func() { err = errors.Join(err, term.Restore(int(tty.Fd()), old)) }()
	return line(tty, MaxSecret)
}

// line reads what is typed or pasted into a raw terminal up to the end of the
// first line with something in it.
func line(r io.Reader, limit int) (string, error) {
	var text []byte
	buf := make([]byte, 4096)
	for {
		n, err := r.Read(buf)
		for _, c := range buf[:n] {
			switch {
			case c == 3: // Ctrl-C: the terminal does not make a signal of it
				return "", Exit(Interrupted, nil, "interrupted")
			case c == 4, (c == '\r' || c == '\n') && len(text) > 0: // Ctrl-D, Enter
				return string(text), nil
			case c == 8 || c == 127:
				text = text[:max(0, len(text)-1)]
			case c >= ' ':
				text = append(text, c)
			}
		}
		switch {
		case len(text) > limit:
			return "", fmt.Errorf("read the terminal: %w: more than %d bytes", errTooLong, limit)
		case errors.Is(err, io.EOF):
			return string(text), nil
		case err != nil:
			return "", fmt.Errorf("read the terminal: %w", err)
		}
	}
}

// source names where an argument's value comes from, without the value.
func source(arg string) string {
	switch {
	case arg == "-":
		return "standard input"
	case strings.HasPrefix(arg, "@"):
		return "the file " + arg[1:]
	}
	return "the argument"
}

var errTooLong = errors.New("too long")

// bounded reads all of r, or fails once it is known to be longer than limit.
func bounded(r io.Reader, limit int64) ([]byte, error) {
	text, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err == nil && int64(len(text)) > limit {
		return nil, fmt.Errorf("%w: more than %d bytes", errTooLong, limit)
	}
	return text, err
}

// readFile reads a whole file of at most limit bytes.
func readFile(name string, limit int64) ([]byte, error) {
	file, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	text, err := bounded(file, limit)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	return text, nil
}

// Roots are the authorities to trust for outer connections (to a broker, to a
// public URL): the system's, and those of the --ca file. nil, which crypto/tls
// takes for the system's, if no file was given. Pins are a matter of their own:
// no root makes a host trusted.
func (a *App) Roots() (*x509.CertPool, error) {
	name := a.opts.ca
	if name == "" {
		return nil, nil
	}
	pool, err := x509.SystemCertPool()
	if err != nil {
		return nil, fmt.Errorf("read the system's certificates: %w", err)
	}
	text, err := readFile(name, maxRoots)
	if err != nil {
		return nil, fmt.Errorf("--ca: %w", err)
	}
	count := 0
	for rest := text; ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			continue // such as the key beside it
		}
		count++
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("--ca %s: certificate %d: %w", name, count, err)
		}
		pool.AddCert(cert)
	}
	if count == 0 {
		hint := ""
		if bytes.HasPrefix(text, []byte{0x30}) {
			hint = "; it looks like DER, convert it with: openssl x509 -inform der"
		}
		return nil, fmt.Errorf("--ca %s: no certificate in PEM form in it%s", name, hint)
	}
	return pool, nil
}
