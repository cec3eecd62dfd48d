package host

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// loadSecret reads 32 bytes from a file in dir, and makes them when there is
// none. A file of another length is an error: replacing it would cut off every
// device that relies on it.
func loadSecret(dir, name string) ([]byte, error) {
	path := filepath.Join(dir, name)
	data, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		data = make([]byte, 32)
		_, _ = rand.Read(data) // never fails
		return data, writeFile(path, data)
	case err != nil:
		return nil, fmt.Errorf("read %s: %w", path, err)
	case len(data) != 32:
		return nil, fmt.Errorf("%s is damaged: it must hold 32 bytes and holds %d; restore it from a backup, "+
			"or remove it and pair every device again", path, len(data))
	}
	return data, nil
}

// nextEpoch counts the starts of this host, so that a broker can tell a newer
// process from an older one.
func nextEpoch(dir string) (int64, error) {
	path := filepath.Join(dir, "epoch")
	var n int64
	data, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return 0, fmt.Errorf("read how often this host started: %w", err)
	default:
		n, err = strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
		if err != nil || n < 0 || n == math.MaxInt64 {
			return 0, fmt.Errorf("%s is damaged: it must hold the number of starts; remove it, and brokers let this host in "+
				"again once they have forgotten the old number (a minute)", path)
		}
	}
	return n + 1, writeFile(path, fmt.Appendf(nil, "%d\n", n+1))
}

// writeFile replaces a file as a whole, owner-only and synced.
func writeFile(path string, data []byte) error {
	dir := filepath.Dir(path)
	tmp, err := os.CreateTemp(dir, ".new-")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer func() { _ = os.Remove(tmp.Name()) }()
	_, err = tmp.Write(data) // CreateTemp makes it 0600
	err = errors.Join(err, tmp.Sync(), tmp.Close())
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return syncDir(dir)
}

// syncDir makes a rename durable where folders can be synced.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	_ = d.Sync() // not every system can
	return d.Close()
}
