package endpoints

import (
	"bytes"
	"errors"
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// qrTexts: a short one, the field form of a full payload, and the longest.
func qrTexts(t *testing.T) map[string]string {
	secret, _ := vectors(t)
	field, err := EncodeSigned(full(), FormField, secret)
	if err != nil {
		t.Fatal(err)
	}
	return map[string]string{"short": smallJSON, "field": string(field), "longest": strings.Repeat("{", 2953)}
}

func TestPNGReadsBack(t *testing.T) {
	texts := qrTexts(t)
	delete(texts, "longest") // ten seconds under the race detector, and the terminal test reads it
	for name, text := range texts {
		var buf bytes.Buffer
		if err := PNG(&buf, text); err != nil {
			t.Fatal(name, err)
		}
		version, err := QRVersion(text)
		if err != nil {
			t.Fatal(err)
		}
		size, err := png.DecodeConfig(bytes.NewReader(buf.Bytes()))
		if want := (17 + 4*version + 2*imageQuiet) * imageScale; err != nil || size.Width != want || size.Height != want {
			t.Errorf("%s: %dx%d pixels, %v; want %d", name, size.Width, size.Height, err, want)
		}
		if got, err := ReadPNG(&buf); err != nil || got != text {
			t.Errorf("%s: read %.40q, %v", name, got, err)
		}
	}
}

// Four candidates and an API key must stay scannable from a phone.
func TestFieldFormFitsVersion30(t *testing.T) {
	secret, _ := vectors(t)
	p := full()
	p.Endpoints[0].Priority = 0
	text, err := EncodeSigned(p, FormField, secret)
	if err != nil {
		t.Fatal(err)
	}
	version, err := QRVersion(string(text))
	if err != nil || version > 30 || len(text) > 1732 {
		t.Errorf("%d bytes, version %d, %v; want at most 1732 and 30", len(text), version, err)
	}
	invite, err := Encode(p, FormInvite)
	if err != nil || len(invite) <= 1732 {
		t.Errorf("the invite form has %d bytes, %v: the field form saves nothing", len(invite), err)
	}
}

var colours = regexp.MustCompile(`\x1b\[[0-9;]*m`)

// screen turns what TerminalQR wrote back into a picture.
func screen(t *testing.T, text string) image.Image {
	t.Helper()
	var lines [][]rune
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, paper) || !strings.HasSuffix(line, noInk+"\n") {
			t.Fatalf("a line does not set and reset its colours: %q", line)
		}
		lines = append(lines, []rune(strings.TrimSuffix(colours.ReplaceAllString(line, ""), "\n")))
	}
	const scale = 4
	img := image.NewGray(image.Rect(0, 0, len(lines[0])*scale, 2*len(lines)*scale))
	for y := range img.Rect.Dy() {
		for x := range img.Rect.Dx() {
			r := lines[y/scale/2][x/scale]
			upper := y/scale%2 == 0
			dark := r == '█' || r == '▀' && upper || r == '▄' && !upper
			img.SetGray(x, y, color.Gray{Y: 255})
			if dark {
				img.SetGray(x, y, color.Gray{})
			}
		}
	}
	return img
}

func TestTerminalQRReadsBack(t *testing.T) {
	for name, text := range qrTexts(t) {
		var buf bytes.Buffer
		if err := TerminalQR(&buf, text); err != nil {
			t.Fatal(name, err)
		}
		columns, rows, err := TerminalSize(text)
		if err != nil {
			t.Fatal(err)
		}
		img := screen(t, buf.String())
		if got := img.Bounds(); got.Dx() != columns*4 || got.Dy() != rows*8 {
			t.Errorf("%s: drawn %v, announced %d columns and %d rows", name, got, columns, rows)
		}
		if got, err := readImage(img); err != nil || got != text {
			t.Errorf("%s: read %.40q, %v", name, got, err)
		}
	}
}

func TestSVG(t *testing.T) {
	var buf bytes.Buffer
	if err := SVG(&buf, smallJSON); err != nil {
		t.Fatal(err)
	}
	version, err := QRVersion(smallJSON)
	if err != nil {
		t.Fatal(err)
	}
	side := (17 + 4*version + 2*imageQuiet) * imageScale
	if want := regexp.MustCompile(`^<svg [^>]*viewBox="0 0 (\d+) (\d+)"`).FindStringSubmatch(buf.String()); len(want) != 3 || want[1] != want[2] || want[1] != strconv.Itoa(side) {
		t.Errorf("side is %v, want %d: %.200s", want, side, buf.String())
	}
	if !strings.Contains(buf.String(), "<path") || strings.Contains(buf.String(), "hermes") {
		t.Errorf("%.200s", buf.String())
	}
}

func TestPictureFiles(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "pair.png")
	victim := filepath.Join(dir, "victim")
	if err := os.WriteFile(victim, []byte("keep"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(victim, path); err != nil { // as another user would put into a shared directory
		t.Fatal(err)
	}
	if err := WritePNGFile(path, smallJSON); err != nil {
		t.Fatal(err)
	}
	if kept, err := os.ReadFile(victim); err != nil || string(kept) != "keep" {
		t.Errorf("wrote through a link: %q, %v", kept, err)
	}
	if info, err := os.Lstat(path); err != nil || !info.Mode().IsRegular() {
		t.Errorf("the link is still there: %v", err)
	}
	wantMode(t, path, 0o600)
	if err := os.Chmod(path, 0o666); err != nil {
		t.Fatal(err)
	}
	if err := WritePNGFile(path, smallJSON+" "); err != nil {
		t.Fatal(err)
	}
	wantMode(t, path, 0o600)
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if got, err := ReadPNG(f); err != nil || got != smallJSON+" " {
		t.Errorf("read %q, %v", got, err)
	}
	if err := WriteSVGFile(filepath.Join(dir, "pair.svg"), smallJSON); err != nil {
		t.Error(err)
	}
	wantMode(t, filepath.Join(dir, "pair.svg"), 0o600)
	wantFiles(t, dir, 3)
	if WritePNGFile(filepath.Join(dir, "none", "x.png"), smallJSON) == nil {
		t.Error("wrote into a directory that does not exist")
	}
}

func TestQRRefuses(t *testing.T) {
	long := testKey + strings.Repeat("{", 2953)
	for _, drawing := range []func(string) error{
		func(s string) error { return PNG(&bytes.Buffer{}, s) },
		func(s string) error { return SVG(&bytes.Buffer{}, s) },
		func(s string) error { return TerminalQR(&bytes.Buffer{}, s) },
		func(s string) error { _, err := QRVersion(s); return err },
		func(s string) error { _, _, err := TerminalSize(s); return err },
	} {
		if err := drawing(""); err == nil {
			t.Error("drew nothing at all")
		}
		err := drawing(long)
		if !errors.Is(err, ErrTooLong) {
			t.Errorf("too long: %v", err)
		} else {
			wantNoSecret(t, "too long", err.Error())
		}
	}
	// Both hold a code that would be read if the bounds were not there.
	var good, wide bytes.Buffer
	if err := PNG(&good, smallJSON); err != nil {
		t.Fatal(err)
	}
	code, err := png.Decode(bytes.NewReader(good.Bytes()))
	if err != nil {
		t.Fatal(err)
	}
	sheet := image.NewGray(image.Rect(0, 0, maxPixels+1, code.Bounds().Dy()))
	draw.Draw(sheet, sheet.Rect, image.White, image.Point{}, draw.Src)
	draw.Draw(sheet, code.Bounds(), code, image.Point{}, draw.Src)
	if err := png.Encode(&wide, sheet); err != nil {
		t.Fatal(err)
	}
	if _, err := readImage(sheet); err != nil {
		t.Fatalf("the wide sample cannot be read at all: %v", err)
	}
	large := append(bytes.Clone(good.Bytes()), make([]byte, maxPNG)...)
	var blank bytes.Buffer
	if err := png.Encode(&blank, image.NewGray(image.Rect(0, 0, 50, 50))); err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{"empty": nil, "no picture": []byte("hello"), "too wide": wide.Bytes(), "blank": blank.Bytes(), "too large": large, "cut": blank.Bytes()[:40]} {
		if text, err := ReadPNG(bytes.NewReader(data)); err == nil {
			t.Errorf("%s: read %q", name, text)
		}
	}
}
