package hermesagent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// envInside tells the second process that it is the second, and where the
// virtual environment is. It carries no authority: the process looks for itself
// whether a network is there.
const envInside = "HERMES_REACH_INTEROP_VENV"

// Main is for TestMain: os.Exit(hermesagent.Main(m)). It installs Hermes Agent,
// runs the tests in a network namespace without any network, and returns the
// exit code. Root may make such a namespace everywhere, other users where the
// kernel lets them have a user namespace. It fails, and says why, where it can
// do neither.
func Main(m interface{ Run() int }) int {
	if os.Getenv(envInside) != "" {
		if err := loopbackUp(); err != nil {
			fmt.Fprintln(os.Stderr, "interop: switch the loopback interface on:", err)
			return 1
		}
		if err := offline(); err != nil {
			fmt.Fprintln(os.Stderr, "interop:", err)
			return 1
		}
		return m.Run()
	}
	// A test that runs too long gets SIGQUIT from go test, a person's ^C is
	// SIGINT: the installation ends by it, the tests get it passed on.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT)
	venv, err := Install(ctx, os.Stderr)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "interop:", err)
		return 1
	}
	code, err := again(venv)
	if err != nil {
		fmt.Fprintln(os.Stderr, "interop: run the tests in a network namespace of their own (be root, or allow user namespaces):", err)
		return 1
	}
	return code
}

// again runs this same binary with the same arguments in a new network namespace
// and returns its exit code.
func again(venv string) (int, error) {
	// The kernel sends Pdeathsig when the thread that started the child ends,
	// so that thread must be ours until the child has ended.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(context.Background(), os.Args[0], os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), envInside+"="+venv)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}}
	}
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT)
	defer signal.Stop(signals)
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		select {
		case s := <-signals:
			_ = cmd.Process.Signal(s) // it may have ended by itself
		case err := <-ended:
			var exit *exec.ExitError
			if err != nil && !errors.As(err, &exit) {
				return 0, err
			}
			if code := cmd.ProcessState.ExitCode(); code >= 0 {
				return code, nil
			}
			return 0, err // a signal has ended it
		}
	}
}

// loopbackUp switches lo on: a new network namespace has it, switched off.
func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	req, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	req.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req)
}

// offline says what of a network this process could use, and nil if there is
// nothing but loopback.
func offline() error {
	interfaces, err := net.Interfaces()
	if err != nil {
		return err
	}
	for _, i := range interfaces {
		if i.Flags&net.FlagLoopback == 0 && i.Flags&net.FlagUp != 0 {
			return fmt.Errorf("the network interface %s is there: the agent runs only without any network (its TestMain must call Main)", i.Name)
		}
	}
	return nil
}

// Unroutable counts how often something in this network namespace, the agent or
// the test, wanted to send to an address that is not loopback. It is the kernel's
// own count, so that it misses nothing that a program keeps to itself.
func Unroutable() (int, error) {
	v4, err := os.ReadFile("/proc/self/net/snmp")
	if err != nil {
		return 0, err
	}
	v6, err := os.ReadFile("/proc/self/net/snmp6")
	if errors.Is(err, os.ErrNotExist) {
		return noRoutes(string(v4), "") // a kernel without IPv6
	}
	if err != nil {
		return 0, err
	}
	return noRoutes(string(v4), string(v6))
}

// noRoutes adds up the counters of both families. For IPv4 a line of names is
// followed by one of values; for IPv6 each line is one name and its value.
func noRoutes(v4, v6 string) (int, error) {
	var names []string
	sum, found := 0, false
	for line := range strings.Lines(v4) {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] != "Ip:" {
			continue
		}
		for i, name := range names {
			if name == "OutNoRoutes" && i < len(fields) {
				n, err := strconv.Atoi(fields[i])
				if err != nil {
					return 0, fmt.Errorf("count of packets without a route: %w", err)
				}
				sum, found = sum+n, true
			}
		}
		names = fields
	}
	for line := range strings.Lines(v6) {
		if value, ok := strings.CutPrefix(line, "Ip6OutNoRoutes"); ok {
			n, err := strconv.Atoi(strings.TrimSpace(value))
			if err != nil {
				return 0, fmt.Errorf("count of packets without a route: %w", err)
			}
			sum += n
		}
	}
	if !found {
		return 0, errors.New("count of packets without a route: the kernel shows none")
	}
	return sum, nil
}
