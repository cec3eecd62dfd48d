package endpoints

import (
	"bytes"
	"errors"
	"fmt"
	"image"
	"image/png"
	"io"
	"strings"

	qr "github.com/piglig/go-qr"
)

// A QR code here is at level L: the payload decides its size, and fewer modules
// scan better than more redundancy. Where the same size has room for a higher
// level, it gets it.

const (
	terminalQuiet = 1 // modules of margin
	imageQuiet    = 2
	imageScale    = 8 // pixels a module
	maxPNG        = 1 << 20
	maxPixels     = 4096 // a side, of a picture that is read
)

// ErrTooLong is wrapped when a text fits no QR code, or not the one asked for.
var ErrTooLong = errors.New("too long for a QR code")

// QRVersion is the size of the code that a text needs: version 1 to 40, of
// 17+4*version modules a side. Phones scan up to version 30 well.
func QRVersion(text string) (int, error) {
	code, err := encodeQR(text)
	if err != nil {
		return 0, err
	}
	return (code.Size() - 17) / 4, nil
}

// TerminalSize is the room TerminalQR needs.
func TerminalSize(text string) (columns, rows int, err error) {
	code, err := encodeQR(text)
	if err != nil {
		return 0, 0, err
	}
	side := code.Size() + 2*terminalQuiet
	return side, (side + 1) / 2, nil
}

func encodeQR(text string) (*qr.QrCode, error) {
	if text == "" {
		return nil, errors.New("endpoints: draw QR code: nothing to draw")
	}
	code, err := qr.EncodeText(text, qr.Low)
	if errors.Is(err, qr.ErrDataTooLong) {
		return nil, fmt.Errorf("endpoints: draw QR code: %d bytes are %w", len(text), ErrTooLong)
	}
	if err != nil {
		// Not wrapped: the library may quote what it could not encode.
		return nil, errors.New("endpoints: draw QR code: the text cannot be encoded")
	}
	return code, nil
}

// Colours are set, not left to the theme: a code drawn in light on dark does not
// scan everywhere. 16 and 231 are black and white also where a theme redefines
// the first sixteen.
const (
	paper  = "\x1b[38;5;16;48;5;231m"
	noInk  = "\x1b[0m"
	blocks = " ▄▀█" // bit 0: lower module dark, bit 1: upper module dark
)

// TerminalQR draws text for a terminal, two modules a character.
func TerminalQR(w io.Writer, text string) error {
	code, err := encodeQR(text)
	if err != nil {
		return err
	}
	glyphs := []rune(blocks)
	var b strings.Builder
	end := code.Size() + terminalQuiet
	for y := -terminalQuiet; y < end; y += 2 {
		b.WriteString(paper)
		for x := -terminalQuiet; x < end; x++ {
			i := 0
			if code.Module(x, y+1) {
				i = 1
			}
			if code.Module(x, y) {
				i |= 2
			}
			b.WriteRune(glyphs[i])
		}
		b.WriteString(noInk + "\n")
	}
	if _, err := io.WriteString(w, b.String()); err != nil {
		return fmt.Errorf("endpoints: draw QR code: %w", err)
	}
	return nil
}

// PNG draws text in black on white, eight pixels a module, two modules of
// margin.
func PNG(w io.Writer, text string) error {
	code, err := encodeQR(text)
	if err != nil {
		return err
	}
	if err := code.WriteAsPNG(qr.NewQrCodeImgConfig(imageScale, imageQuiet), w); err != nil {
		return fmt.Errorf("endpoints: draw QR code: %w", err)
	}
	return nil
}

// WritePNGFile writes PNG's picture to a file of mode 0600, because it shows an
// API key and a pairing code. An existing file is replaced whole; a link at path
// is replaced, never followed.
func WritePNGFile(path, text string) error {
	var buf bytes.Buffer
	if err := PNG(&buf, text); err != nil {
		return err
	}
	return writePicture(path, buf.Bytes())
}

// SVG draws text like PNG, as one path.
func SVG(w io.Writer, text string) error {
	code, err := encodeQR(text)
	if err != nil {
		return err
	}
	if err := code.WriteAsSVG(qr.NewQrCodeImgConfig(imageScale, imageQuiet*imageScale, qr.WithOptimalSVG()), w); err != nil {
		return fmt.Errorf("endpoints: draw QR code: %w", err)
	}
	return nil
}

// WriteSVGFile is WritePNGFile for SVG.
func WriteSVGFile(path, text string) error {
	var buf bytes.Buffer
	if err := SVG(&buf, text); err != nil {
		return err
	}
	return writePicture(path, buf.Bytes())
}

func writePicture(path string, data []byte) error {
	if err := replaceFile(path, data, true); err != nil {
		return fmt.Errorf("endpoints: write QR picture: %w", err)
	}
	return nil
}

// ReadPNG reads the text of a QR code from a picture of at most 1 MiB and
// 4096x4096 pixels: a screenshot of what PNG or TerminalQR drew.
func ReadPNG(r io.Reader) (string, error) {
	data, err := io.ReadAll(io.LimitReader(r, maxPNG+1))
	if err != nil {
		return "", fmt.Errorf("endpoints: read QR picture: %w", err)
	}
	if len(data) > maxPNG {
		return "", fmt.Errorf("endpoints: read QR picture: larger than %d bytes", maxPNG)
	}
	size, err := png.DecodeConfig(bytes.NewReader(data))
	if err != nil {
		return "", fmt.Errorf("endpoints: read QR picture: %w", err)
	}
	if size.Width > maxPixels || size.Height > maxPixels {
		return "", fmt.Errorf("endpoints: read QR picture: more than %dx%d pixels", maxPixels, maxPixels)
	}
	img, err := png.Decode(bytes.NewReader(data))
	if err != nil {
		return "", fmt.Errorf("endpoints: read QR picture: %w", err)
	}
	return readImage(img)
}

func readImage(img image.Image) (string, error) {
	text, err := qr.Decode(img)
	if err != nil {
		return "", errors.New("endpoints: read QR picture: no readable QR code in it")
	}
	return text, nil
}
