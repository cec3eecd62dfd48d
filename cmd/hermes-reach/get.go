package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hermes-reach/hermes-reach/internal/cli"
	"github.com/hermes-reach/hermes-reach/reach"
)

type getFlags struct {
	device  deviceFlags
	method  string
	data    string
	headers []string
	include bool
	output  string
}

func newGetCommand(app *cli.App) *cobra.Command {
	var f getFlags
	cmd := &cobra.Command{
		Use:   "get PATH",
		Short: "Make one request to the host over the best way there",
		Long: `Sends one request inside the pinned connection and writes the body to standard
output as it comes. An answer of 400 and above is exit code 1.`,
		Example: "  hermes-reach get /api/v1/models --header @key.txt",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			req, err := f.request(cmd.Context(), app, args[0])
			if err != nil {
				return err
			}
			c, _, err := f.device.open(app, cmd)
			if err != nil {
				return notReachable(err)
			}
			defer func() { _ = c.Close() }()
			return f.run(app, c, req)
		},
	}
	f.device.add(cmd)
	fs := cmd.Flags()
	fs.StringVar(&f.method, "method", "", "HTTP `METHOD`; empty for GET, or POST with --data")
	fs.StringVar(&f.data, "data", "", "request body: text, `@FILE`, or - for standard input")
	fs.StringArrayVar(&f.headers, "header", nil, "a header `'NAME: VALUE'`, or @FILE with one a line; repeatable")
	fs.BoolVar(&f.include, "include", false, "write the status line and headers first")
	fs.StringVar(&f.output, "output", "", "write the body to `FILE`")
	return cli.OnDevice(cmd)
}

func (f *getFlags) request(ctx context.Context, app *cli.App, path string) (*http.Request, error) {
	if !strings.HasPrefix(path, "/") {
		return nil, cli.Usagef("PATH begins with a slash, such as /api/v1/models")
	}
	var body io.Reader
	if f.data != "" {
		data, err := readData(app, f.data)
		if err != nil {
			return nil, err
		}
		body = bytes.NewReader(data)
	}
	method := f.method
	if method == "" {
		method = map[bool]string{true: http.MethodPost, false: http.MethodGet}[body != nil]
	}
	req, err := http.NewRequestWithContext(ctx, strings.ToUpper(method), reach.Origin+path, body)
	if err != nil {
		return nil, cli.Usagef("this is not a request: %v", err)
	}
	for _, h := range f.headers {
		if err := addHeaders(app, req, h); err != nil {
			return nil, err
		}
	}
	return req, nil
}

// readData reads a whole request body: unlike a secret it may be large and
// keeps its last newline.
func readData(app *cli.App, arg string) ([]byte, error) {
	switch {
	case arg == "-":
		return io.ReadAll(app.Stdin)
	case strings.HasPrefix(arg, "@"):
		return os.ReadFile(arg[1:])
	}
	return []byte(arg), nil
}

// addHeaders adds the headers of one --header, a file of them if it begins with @.
func addHeaders(app *cli.App, req *http.Request, arg string) error {
	text := arg
	if strings.HasPrefix(arg, "@") || arg == "-" {
		var err error
		if text, err = app.Secret(arg); err != nil {
			return err
		}
	}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" {
			continue
		}
		name, value, ok := strings.Cut(line, ":")
		if !ok {
			return cli.Usagef("a header is NAME: VALUE") // without the text: it may hold a key
		}
		req.Header.Add(strings.TrimSpace(name), strings.TrimSpace(value))
	}
	return nil
}

func (f *getFlags) run(app *cli.App, c *reach.Client, req *http.Request) (err error) {
	res, err := c.HTTPClient().Do(req)
	if err != nil {
		return notReachable(err)
	}
	defer func() { _ = res.Body.Close() }()
	path, _ := reach.PathOf(res)
	app.Log.Debug("answered", "status", res.StatusCode, "path", path.String(), "protocol", res.Proto)
	out := app.Stdout
	if f.output != "" {
		file, err := os.Create(f.output)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, file.Close()) }()
		out = file
	}
	if err := f.write(out, res); err != nil {
		return err
	}
	if res.StatusCode >= http.StatusBadRequest {
		return cli.Exit(cli.Failed, errors.New(res.Status), "the host answered %s", res.Status)
	}
	return nil
}

// write writes the answer as it comes.
func (f *getFlags) write(out io.Writer, res *http.Response) error {
	if f.include {
		fmt.Fprintf(out, "%s %s\n", res.Proto, res.Status)
		if err := res.Header.Write(out); err != nil {
			return err
		}
		fmt.Fprintln(out)
	}
	body := &watched{r: res.Body}
	if _, err := io.Copy(out, body); err != nil {
		if body.err == nil {
			return fmt.Errorf("write the answer: %w", err)
		}
		return cli.Exit(cli.Failed, err, "the answer was cut before its end: %v", err)
	}
	return nil
}

// watched remembers that reading failed, and not writing.
type watched struct {
	r   io.Reader
	err error
}

func (w *watched) Read(p []byte) (int, error) {
	n, err := w.r.Read(p)
	if !errors.Is(err, io.EOF) {
		w.err = err
	}
	return n, err
}
