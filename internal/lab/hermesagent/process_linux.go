package hermesagent

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// stopGrace is how long a process has to end by itself. The gateway takes under
// a second when it is idle.
const stopGrace = 10 * time.Second

// process is one program of the agent with everything that it starts.
type process struct {
	name  string
	log   string        // path of the file with all that it said
	pid   int           // of the program and of its process group
	ended chan struct{} // closed when it has ended
	exit  string        // how it ended; read it only after ended is closed
}

// start runs a command in a process group of its own, its output in dir/name.log.
func start(dir, name string, env []string, args ...string) (*process, error) {
	p := &process{name: name, log: filepath.Join(dir, name+".log"), ended: make(chan struct{})}
	out, err := os.OpenFile(p.log, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	defer out.Close() // the child has it by then
	// No context ends it: that would kill the program and leave its children.
	cmd := exec.CommandContext(context.Background(), args[0], args[1:]...)
	cmd.Env, cmd.Dir, cmd.Stdout, cmd.Stderr = env, dir, out, out
	// A test that panics or is killed takes the agent along.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	go func() {
		// The kernel sends Pdeathsig when the thread that started the child
		// ends: this one lives until the child has ended.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // the state tells more
			p.exit = cmd.ProcessState.String()
			close(p.ended)
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	p.pid = cmd.Process.Pid
	return p, nil
}

// stop asks the process to end, waits, and kills what is left of its group. It
// returns when the program has ended, and tells if it had to be killed.
func (p *process) stop() error {
	_ = syscall.Kill(p.pid, syscall.SIGTERM) // it may have ended by itself
	grace := time.NewTimer(stopGrace)
	defer grace.Stop()
	var err error
	select {
	case <-p.ended:
	case <-grace.C:
		err = fmt.Errorf("%s had not ended %v after SIGTERM and was killed", p.name, stopGrace)
	}
	_ = syscall.Kill(-p.pid, syscall.SIGKILL) // what it started and did not end
	<-p.ended
	return err
}

// said returns the last n lines of the process's output.
func (p *process) said(n int) string {
	b, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimRight(string(b), "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
