package endpoints

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/hermes-reach/hermes-reach/endpoints/pyjson"
)

// Canonical is the one spelling of a payload that is signed: the JSON object
// without its top-level "sig", keys sorted by code point at every depth, no
// white space, ASCII only, numbers as Python prints them. It is its own
// canonical form.
//
// NaN, infinities and numbers that do not fit a double are errors, as is
// anything larger than 384 KiB (before or after) or nested deeper than 64.
func Canonical(text []byte) ([]byte, error) { return canonical(text, "sig") }

// canonical drops the named top-level members: what a signature covers depends
// on which signature it is.
func canonical(text []byte, drop ...string) ([]byte, error) {
	n, err := pyjson.Parse(text)
	if err != nil {
		return nil, err
	}
	if n.Kind != pyjson.Object {
		return nil, fmt.Errorf("%w: not an object", pyjson.ErrSyntax)
	}
	n.Members = slices.DeleteFunc(n.Members, func(m pyjson.Member) bool { return slices.Contains(drop, m.Key) })
	out := pyjson.Append(nil, n)
	if len(out) > pyjson.MaxText {
		return nil, fmt.Errorf("%w: longer than %d bytes in canonical form", pyjson.ErrSyntax, pyjson.MaxText)
	}
	return out, nil
}

// Sign is the value of "sig" for a payload: padded standard base64 of
// HMAC-SHA256 over its canonical form. The secret is the QR secret file's
// content as it is; one shorter than 16 bytes is refused.
func Sign(secret, text []byte) (string, error) {
	if len(secret) < minSecret {
		return "", fmt.Errorf("endpoints: sign payload: secret has %d bytes, need at least %d", len(secret), minSecret)
	}
	c, err := Canonical(text)
	if err != nil {
		return "", fmt.Errorf("endpoints: sign payload: %w", err)
	}
	return base64.StdEncoding.EncodeToString(mac(secret, c)), nil
}

// Verify reports whether the payload's own "sig" is the secret's. It works on
// the text as it was received, takes the same time for every wrong signature,
// and answers false to whatever it does not understand.
func Verify(secret, text []byte) bool {
	n, err := pyjson.Parse(text)
	if err != nil || len(secret) < minSecret {
		return false
	}
	sig, ok := n.Get("sig")
	if !ok || sig.Kind != pyjson.String || len(sig.Text) != base64.StdEncoding.EncodedLen(sha256.Size) {
		return false
	}
	// DecodeString skips line breaks inside its input, so it may return short.
	got, err := base64.StdEncoding.Strict().DecodeString(sig.Text)
	if err != nil || len(got) != sha256.Size {
		return false
	}
	c, err := Canonical(text)
	return err == nil && hmac.Equal(got, mac(secret, c))
}

func mac(secret, canonical []byte) []byte {
	h := hmac.New(sha256.New, secret)
	h.Write(canonical)
	return h.Sum(nil)
}

const (
	secretSize = 32      // of one made here
	minSecret  = 16      // what is shorter is replaced
	maxSecret  = 1 << 16 // what is longer is not a secret but a mistake in the path
)

// LoadOrCreateSecret reads the QR secret file, or makes one of 32 random bytes:
// mode 0600 in a directory of mode 0700. A file of 16 bytes or more is used as
// it is, because another program may have made it and signs with it; a shorter
// one is replaced. Several processes may call it at once and agree on a new
// file's content.
func LoadOrCreateSecret(path string) ([]byte, error) {
	secret, err := readSecret(path)
	if err == nil && len(secret) >= minSecret {
		return secret, nil
	}
	exists := err == nil
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("endpoints: read QR secret: %w", err)
	}
	if err := ownDir(filepath.Dir(path)); err != nil {
		return nil, fmt.Errorf("endpoints: make QR secret: %w", err)
	}
	fresh := make([]byte, secretSize)
	rand.Read(fresh)
	if err := replaceFile(path, fresh, exists); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("endpoints: make QR secret: %w", err)
	}
	// What stands there now is what everybody uses, whoever wrote it.
	if secret, err = readSecret(path); err != nil {
		return nil, fmt.Errorf("endpoints: read QR secret: %w", err)
	}
	if len(secret) < minSecret {
		return nil, fmt.Errorf("endpoints: QR secret %s is shorter than %d bytes after it was made: does something else write it?", path, minSecret)
	}
	return secret, nil
}

// readSecret also takes away what access others have: the file may come from a
// backup or from an older program.
func readSecret(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxSecret {
		return nil, fmt.Errorf("%s is not a file of at most %d bytes", path, maxSecret)
	}
	if info.Mode().Perm()&0o077 != 0 {
		if err := os.Chmod(path, 0o600); err != nil {
			return nil, err
		}
	}
	return os.ReadFile(path)
}

// ownDir makes dir, or closes an existing one to others. It refuses directories
// that are shared by nature, where closing would break other programs.
func ownDir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	info, err := os.Stat(dir)
	if err != nil {
		return err
	}
	if info.Mode().Perm()&0o077 == 0 {
		return nil
	}
	if abs, err := filepath.Abs(dir); err != nil || abs == filepath.Dir(abs) || info.Mode()&fs.ModeSticky != 0 {
		return fmt.Errorf("%s is shared with others: choose a directory of its own", dir)
	}
	return os.Chmod(dir, 0o700)
}

// replaceFile puts data at path with mode 0600, whole or not at all, also when
// the machine stops in the middle. It never writes through a link that stands
// at path. Without clobber an existing path is fs.ErrExist.
func replaceFile(path string, data []byte, clobber bool) (err error) {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, ".new-*") // 0600, O_EXCL
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // gone already where it was renamed
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if clobber {
		err = os.Rename(f.Name(), path)
	} else if err = os.Link(f.Name(), path); err != nil && !errors.Is(err, fs.ErrExist) {
		err = os.Rename(f.Name(), path) // a file system without links
	}
	if err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	// Not every platform can sync a directory; the file itself is safe.
	_ = d.Sync()
	return d.Close()
}
