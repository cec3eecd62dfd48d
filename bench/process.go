package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"time"
)

// The roles that a process of its own may have.
const (
	roleBroker = "broker"
	roleHost   = "host"
	roleSplice = "splice"
)

// memory is what a process allocated so far and what it holds.
type memory struct {
	Mallocs uint64 `json:"mallocs"`
	Bytes   uint64 `json:"bytes"` // allocated since the start
	Held    uint64 `json:"held"`  // heap and stacks in use after a collection
}

// start runs a role in this process.
func start(role string, at place) (*part, error) {
	switch role {
	case roleBroker:
		return startBroker()
	case roleHost:
		return startHost(at)
	case roleSplice:
		return startSplice(at)
	}
	return nil, fmt.Errorf("there is no role %q", role)
}

// ServeRole is the whole life of a process with a role. It reads a place from
// in, starts the role and tells where it is; then it answers each line with its
// memory, until in ends.
func ServeRole(role string, in io.Reader, out io.Writer) error {
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 1<<20)
	if !lines.Scan() {
		return errors.New("nobody says where the others are")
	}
	var at place
	if err := json.Unmarshal(lines.Bytes(), &at); err != nil {
		return fmt.Errorf("read the place: %w", err)
	}
	p, err := start(role, at)
	if err != nil {
		return err
	}
	defer p.stop()
	answers := json.NewEncoder(out)
	if err := answers.Encode(p.place); err != nil {
		return err
	}
	for lines.Scan() {
		if err := answers.Encode(measureMemory()); err != nil {
			return err
		}
	}
	return lines.Err()
}

func measureMemory() memory {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	mem := memory{Mallocs: m.Mallocs, Bytes: m.TotalAlloc}
	debug.FreeOSMemory() // two collections: what pools hold goes as well
	runtime.GC()
	runtime.ReadMemStats(&m)
	mem.Held = m.HeapInuse + m.StackInuse
	return mem
}

// process is a role in a process of its own.
type process struct {
	cmd     *exec.Cmd
	in      io.WriteCloser
	answers *json.Decoder
}

// spawn starts this program again with -role and tells it the place.
func spawn(ctx context.Context, role string, at *place) (*process, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, exe, "-role", role)
	cmd.Stderr = os.Stderr
	cmd.WaitDelay = time.Second
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the %s: %w", role, err)
	}
	p := &process{cmd: cmd, in: in, answers: json.NewDecoder(out)}
	if err := errors.Join(json.NewEncoder(in).Encode(at), p.answers.Decode(at)); err != nil {
		p.stop()
		return nil, fmt.Errorf("the %s did not start: %w", role, err)
	}
	return p, nil
}

func (p *process) memory() (m memory, err error) {
	if _, err := io.WriteString(p.in, "\n"); err != nil {
		return m, err
	}
	return m, p.answers.Decode(&m)
}

// stop ends the process and waits for it.
func (p *process) stop() {
	_ = p.in.Close()
	_ = p.cmd.Wait()
}

// cpu gives the processor seconds that a process used so far, where the system
// tells (Linux), else 0. Its unit is a hundredth of a second.
func cpu(pid int) float64 {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(stat), ") ") // the name may hold spaces
	const utime, stime = 11, 12                   // proc(5), counted from the state
	fields := strings.Fields(rest)
	if len(fields) <= stime {
		return 0
	}
	user, _ := strconv.ParseFloat(fields[utime], 64)
	system, _ := strconv.ParseFloat(fields[stime], 64)
	return (user + system) / 100
}

// processes are all parts but the device, which is this process.
type processes struct {
	all    map[string]*process
	place  place
	device func()
	paths  map[string]Dialer
}

// startProcesses starts every part and dials nothing yet.
func startProcesses(ctx context.Context) (*processes, error) {
	ps := &processes{all: make(map[string]*process)}
	for _, role := range []string{roleBroker, roleHost, roleSplice} {
		p, err := spawn(ctx, role, &ps.place)
		if err != nil {
			ps.stop()
			return nil, err
		}
		ps.all[role] = p
	}
	var err error
	if ps.paths, ps.device, err = startDevice(ps.place); err != nil {
		ps.stop()
		return nil, err
	}
	return ps, nil
}

func (ps *processes) stop() {
	if ps.device != nil {
		ps.device()
	}
	for _, role := range []string{roleHost, roleSplice, roleBroker} {
		if p := ps.all[role]; p != nil {
			p.stop()
		}
	}
}

// cpu is what all parts used so far, the device included.
func (ps *processes) cpu() float64 {
	sum := cpu(os.Getpid())
	for _, p := range ps.all {
		sum += cpu(p.cmd.Process.Pid)
	}
	return sum
}

// watchOthers measures from now on; what it returns gives the part of all
// processors' time that other programs took, 0 where the system does not tell.
func (ps *processes) watchOthers() func() float64 {
	all, ours := machineCPU(), ps.cpu()
	began := time.Now()
	return func() float64 {
		theirs := machineCPU() - all - (ps.cpu() - ours)
		return max(0, theirs/(time.Since(began).Seconds()*float64(runtime.NumCPU())))
	}
}

// machineCPU is the processor seconds that were used on the machine since it
// started, the time that its host kept from it included.
func machineCPU() float64 {
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0
	}
	line, _, _ := strings.Cut(string(stat), "\n")
	sum := 0.0
	for i, f := range strings.Fields(line) {
		const idle, iowait, guest = 4, 5, 9 // proc(5); guests are counted before, too
		if v, err := strconv.ParseFloat(f, 64); err == nil && i != idle && i != iowait && i < guest {
			sum += v
		}
	}
	return sum / 100
}
