package main

import (
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/spf13/cobra"

	"github.com/hermes-reach/hermes-reach/internal/cli"
	"github.com/hermes-reach/hermes-reach/internal/host/holder"
	"github.com/hermes-reach/hermes-reach/reach/forward"
)

func newForwardCommand(app *cli.App) *cobra.Command {
	var (
		device       deviceFlags
		listen, unix string
		cfg          forward.Config
	)
	cmd := &cobra.Command{
		Use:   "forward",
		Short: "Give browsers and programs on this device a local address of the host",
		Long: `Serves /relay, /api and /dashboard of the host on a loopback address of this
device, over the best way there. Only the link that is printed opens it in a
browser, once; scripts send the key in the header X-Reach-Key.`,
		Example: "  hermes-reach forward --listen 127.0.0.1:8788",
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, p, err := device.open(app, cmd)
			if err != nil {
				return notReachable(err)
			}
			defer func() { _ = c.Close() }()
			ln, err := forwardListener(listen, unix)
			if err != nil {
				return err
			}
			cfg.Profile, cfg.Transport, cfg.Log = p.Name, c, app.Log
			fw, err := forward.New(ln, cfg)
			if err != nil {
				return err
			}
			v := map[string]string{"url": fw.URL(), "open": fw.OpenURL(), "key": fw.Key()}
			if err := app.Result(v, func(w io.Writer) {
				fmt.Fprintf(w, "Open once in a browser:  %s\nFor scripts:             curl -H 'X-Reach-Key: %s' %s/relay/health\n", v["open"], v["key"], v["url"])
			}); err != nil {
				return err
			}
			return fw.Run(cmd.Context())
		},
	}
	device.add(cmd)
	f := cmd.Flags()
	f.StringVar(&listen, "listen", "127.0.0.1:8788", "loopback `ADDRESS` to serve on")
	f.StringVar(&unix, "unix", "", "serve on a Unix `SOCKET` instead")
	f.StringVar(&cfg.Namespace, "namespace", "", "put one namespace at the root: relay, api or dashboard: `NAME`")
	f.BoolVar(&cfg.NoLocalAuth, "no-local-auth", false, "let every user and program of this device use it")
	return cli.LongRunning(cli.OnDevice(cmd))
}

// forwardListener opens what devices' own programs connect to. Nothing but
// loopback is opened even for a moment.
func forwardListener(listen, unix string) (net.Listener, error) {
	if unix != "" {
		return forward.ListenUnix(unix)
	}
	host, _, err := net.SplitHostPort(listen)
	ip := net.ParseIP(host)
	if err != nil || host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return nil, cli.Usagef("--listen %s is not a loopback address with a port, such as 127.0.0.1:8788: "+
			"this is never served to a network", listen)
	}
	ln, err := holder.Listen(listen)
	if errors.Is(err, holder.ErrTaken) {
		return nil, fmt.Errorf("%w: choose another address with --listen", err)
	}
	if err != nil {
		return nil, cli.Exit(cli.WrongUsage, err, "--listen %s: %v", listen, err)
	}
	return ln, nil
}
