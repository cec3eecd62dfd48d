package cli

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/term"
)

func isTerminal(w io.Writer) bool {
	file, ok := w.(*os.File)
	return ok && term.IsTerminal(int(file.Fd()))
}

func window(w io.Writer) (columns, rows int) {
	file, ok := w.(*os.File)
	if !ok {
		return 0, 0
	}
	columns, rows, err := term.GetSize(int(file.Fd()))
	if err != nil {
		return 0, 0
	}
	return columns, rows
}

// JSON reports whether the result is for a script (--json). Then nothing but
// objects, by [App.PrintJSON] or [App.Result], goes to Stdout.
func (a *App) JSON() bool { return a.opts.json }

// PrintJSON writes v as one line. Commands print one object, or one a line for a
// stream.
func (a *App) PrintJSON(v any) error {
	e := json.NewEncoder(a.Stdout)
	e.SetEscapeHTML(false) // invites are URLs
	if err := e.Encode(v); err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	return nil
}

// Result is a command's outcome: v as JSON for a script, or what people writes.
func (a *App) Result(v any, people func(w io.Writer)) error {
	if a.JSON() {
		return a.PrintJSON(v)
	}
	w := bufio.NewWriter(a.Stdout)
	people(w)
	if err := w.Flush(); err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	return nil
}

// Say writes a line for people to Stdout, and nothing for a script.
func (a *App) Say(format string, args ...any) {
	if !a.JSON() {
		fmt.Fprintf(a.Stdout, format+"\n", args...)
	}
}

// Progress writes a line to Stderr if a person is looking.
func (a *App) Progress(format string, args ...any) {
	if a.fancy(a.Stderr) {
		fmt.Fprintf(a.Stderr, format+"\n", args...)
	}
}

// fancy reports whether w may show progress and colours.
func (a *App) fancy(w io.Writer) bool {
	return a.Terminal(w) && a.env("NO_COLOR") == "" && a.env("TERM") != "dumb"
}

// A Mood is how a word is coloured.
type Mood string

// The moods. They are shown only to a person who wants colours, so the word has
// to say it all by itself.
const (
	Plain Mood = ""
	Good  Mood = "32"
	Doubt Mood = "33"
	Bad   Mood = "31"
	Faint Mood = "2"
)

// A Cell is one word or sentence of a table.
type Cell struct {
	Text string
	Mood Mood
}

// Cells makes plain cells.
func Cells(texts ...string) []Cell {
	row := make([]Cell, len(texts))
	for i, text := range texts {
		row[i].Text = text
	}
	return row
}

// Table writes rows in columns, with two spaces between. The text of a cell may
// come from a stranger: control characters do not reach the terminal.
func (a *App) Table(w io.Writer, header []string, rows ...[]Cell) {
	colours := a.fancy(a.Stdout)
	all := rows
	if len(header) > 0 {
		top := Cells(header...)
		for i := range top {
			top[i].Mood = Faint
		}
		all = append([][]Cell{top}, rows...)
	}
	var width []int
	for _, row := range all {
		for i, c := range row {
			if i == len(width) {
				width = append(width, 0)
			}
			width[i] = max(width[i], utf8.RuneCountInString(Clean(c.Text)))
		}
	}
	for _, row := range all {
		var line strings.Builder
		for i, c := range row {
			text := Clean(c.Text)
			pad := strings.Repeat(" ", width[i]-utf8.RuneCountInString(text)+2)
			if colours && c.Mood != Plain {
				text = "\x1b[" + string(c.Mood) + "m" + text + "\x1b[0m"
			}
			line.WriteString(text + pad)
		}
		fmt.Fprintln(w, strings.TrimRight(line.String(), " "))
	}
}

// Clean makes text safe to show on a terminal in one line: a line break becomes
// "; ", every other control character (and so every escape sequence) and every
// character that turns the direction of writing becomes U+FFFD.
func Clean(text string) string {
	text = strings.TrimRight(text, "\r\n")
	text = strings.NewReplacer("\r\n", "; ", "\n", "; ", "\t", " ").Replace(text)
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r) {
			return unicode.ReplacementChar
		}
		return r
	}, text)
}
