package pins

import (
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"time"
)

// The files of an identity folder. Key and first leaf are one file, so that
// no crash can leave the one without the other.
const (
	identityFile = "identity.pem"
	namesFile    = "names.pem" // the further leaf; no secret, but one more thing to keep

	// What the Python plugin leaves in its folder; taken as it is.
	pluginCert = "cert.pem"
	pluginKey  = "key.pem"

	maxFile = 1 << 20
)

// LoadOrCreate gives the identity kept in dir, and makes one when dir holds
// none. It never replaces an identity: what is there and cannot be read is an
// error that names the file. Any number of processes may call it at once; all
// get the same identity. hosts the identity does not cover yet are added as by
// [Identity.AddHosts]. The folder is made, or changed to be, owner-only.
func LoadOrCreate(dir string, hosts []string, now time.Time) (*Identity, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("identity folder: %w", err)
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		return nil, fmt.Errorf("identity folder: %w", err)
	}
	id, err := Load(dir)
	if errors.Is(err, fs.ErrNotExist) {
		if id, err = New(hosts, now); err != nil {
			return nil, err
		}
		if err = id.create(dir); errors.Is(err, fs.ErrExist) {
			id, err = Load(dir) // another process was faster: its identity is the identity
		}
	}
	if err != nil {
		return nil, err
	}
	if _, err := id.AddHosts(hosts, now); err != nil {
		return nil, err
	}
	return id, nil
}

// Load gives the identity kept in dir: our own file, else the cert.pem and
// key.pem of the Python plugin. [fs.ErrNotExist] means that there is neither;
// half of the plugin's pair is an error of its own.
func Load(dir string) (*Identity, error) {
	id, err := loadOwn(dir)
	if errors.Is(err, fs.ErrNotExist) {
		id, err = loadPlugin(dir)
	}
	if err != nil {
		return nil, err
	}
	if err := id.KeepNames(dir); err != nil {
		return nil, err
	}
	return id, nil
}

// LoadPEM takes a certificate and its key from two PEM files, such as the
// RSA-3072 pair of the Python plugin. Names added later are kept in memory
// unless [Identity.KeepNames] gives them a folder.
func LoadPEM(certFile, keyFile string) (*Identity, error) {
	certPEM, err := readFile(certFile)
	if err != nil {
		return nil, fmt.Errorf("identity certificate: %w", err)
	}
	keyPEM, err := readFile(keyFile)
	if err != nil {
		return nil, fmt.Errorf("identity key: %w", err)
	}
	id, err := parsePair(certPEM, keyPEM)
	if err != nil {
		return nil, fmt.Errorf("identity %s with %s: %w", certFile, keyFile, err)
	}
	return id, nil
}

// KeepNames makes dir (which must exist) the place where added names are kept,
// and takes up those that are there. Names of another key are left over from
// before a rotation: they are ignored, and replaced by the next AddHosts.
func (id *Identity) KeepNames(dir string) error {
	id.mu.Lock()
	defer id.mu.Unlock()
	id.dir = dir
	return id.readNames()
}

func loadOwn(dir string) (*Identity, error) {
	path := filepath.Join(dir, identityFile)
	data, err := readFile(path)
	if err != nil {
		return nil, fmt.Errorf("identity: %w", err)
	}
	if err := ownerOnly(path); err != nil {
		return nil, err
	}
	id, err := parsePair(data, data)
	if err != nil {
		return nil, fmt.Errorf("identity file %s is damaged: %w; it is never replaced by itself: put it back from a backup, "+
			"or move it away to start with a new key, after which every device must pair again", path, err)
	}
	return id, nil
}

func loadPlugin(dir string) (*Identity, error) {
	cert, key := filepath.Join(dir, pluginCert), filepath.Join(dir, pluginKey)
	_, certErr := os.Lstat(cert)
	_, keyErr := os.Lstat(key)
	if errors.Is(certErr, fs.ErrNotExist) && errors.Is(keyErr, fs.ErrNotExist) {
		return nil, fmt.Errorf("no identity in %s: %w", dir, fs.ErrNotExist)
	}
	if err := errors.Join(certErr, keyErr); err != nil {
		// %v: half a pair must not look like "nothing there", which would make a new key.
		return nil, fmt.Errorf("identity in %s is half there: %v; put the missing file back, or move the other one away "+
			"to start with a new key, after which every device must pair again", dir, err)
	}
	return LoadPEM(cert, key)
}

// parsePair reads a key and its leaf. Errors never quote the input.
func parsePair(certPEM, keyPEM []byte) (*Identity, error) {
	pair, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		return nil, err
	}
	if pair.Leaf == nil {
		if pair.Leaf, err = x509.ParseCertificate(pair.Certificate[0]); err != nil {
			return nil, err
		}
	}
	if len(sans(pair.Leaf)) == 0 {
		return nil, errors.New("the certificate names no host (no subject alternative names)")
	}
	return newIdentity(pair)
}

// create stores a fresh identity; fs.ErrExist when there is one already.
func (id *Identity) create(dir string) error {
	key, err := x509.MarshalPKCS8PrivateKey(id.first.PrivateKey)
	if err != nil {
		return fmt.Errorf("store identity: %w", err)
	}
	data := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key})
	data = append(data, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: id.first.Leaf.Raw})...)
	// A hard link fails when the name is taken: the whole file appears at once, and only once.
	if err := writeDurable(dir, identityFile, data, (*os.Root).Link); err != nil {
		return fmt.Errorf("store identity: %w", err)
	}
	id.dir = dir
	return nil
}

// readNames takes up the further leaf from disk. The caller holds id.mu.
func (id *Identity) readNames() error {
	if id.dir == "" {
		return nil
	}
	path := filepath.Join(id.dir, namesFile)
	data, err := readFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("names of the identity: %w", err)
	}
	leaf, err := parseLeaf(data)
	if err == nil && !Of(leaf).Equal(id.pin) {
		return nil
	}
	if err == nil {
		err = checkFurther(id.first.Leaf, leaf)
	}
	if err != nil {
		return fmt.Errorf("file %s is damaged: %w; delete it: the key is not affected, and the configured names are added again", path, err)
	}
	id.serve(leaf)
	return nil
}

// writeNames stores the further leaf. The caller holds id.mu.
func (id *Identity) writeNames(leaf *x509.Certificate) error {
	if id.dir == "" {
		return nil
	}
	data := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: leaf.Raw})
	if err := writeDurable(id.dir, namesFile, data, (*os.Root).Rename); err != nil {
		return fmt.Errorf("store names: %w", err)
	}
	return nil
}

func parseLeaf(data []byte) (*x509.Certificate, error) {
	block, _ := pem.Decode(data)
	if block == nil || block.Type != "CERTIFICATE" {
		return nil, errors.New("no PEM certificate in it")
	}
	return x509.ParseCertificate(block.Bytes)
}

// writeDurable writes data to a temporary file, flushes it, gives it its name
// by publish (Link: never replaces; Rename: replaces at once) and flushes the
// folder, so that a power cut leaves the old state or the new one.
func writeDurable(dir, name string, data []byte, publish func(r *os.Root, from, to string) error) (err error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	temp := "." + name + "." + rand.Text() + ".tmp"
	f, err := root.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = root.Remove(temp) }() // after a rename there is nothing left to remove
	_, err = f.Write(data)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := publish(root, temp, name); err != nil {
		return err
	}
	return syncDir(root)
}

// syncDir makes the folder's entries durable. Windows has no such call: there
// the file system's journal does it.
func syncDir(root *os.Root) error {
	if runtime.GOOS == "windows" {
		return nil
	}
	d, err := root.Open(".")
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// readFile reads a file of bounded size.
func readFile(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxFile {
		return nil, fmt.Errorf("%s is no file of at most 1 MiB", path)
	}
	return os.ReadFile(path)
}

// ownerOnly refuses a key that other users of the machine can read.
func ownerOnly(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if mode := info.Mode().Perm(); runtime.GOOS != "windows" && mode&0o077 != 0 {
		return fmt.Errorf("identity file %s can be read by others (mode %04o): its key may be known to them; "+
			"if it is not, run chmod 600 on it, else move it away and pair every device again", path, mode)
	}
	return nil
}
