// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/internal/figures"
)

// The ways in which a driver fails.
var (
	ErrHung        = errors.New("no answer in time")
	ErrNonsense    = errors.New("the answer is none")
	ErrDied        = errors.New("the driver ended")
	ErrUnsupported = errors.New("not supported")
)

// Driver is a running end of a participant. Its methods are for one goroutine, but Kill.
type Driver struct {
	name    string
	cmd     *exec.Cmd
	to      *os.File
	answers chan Answer
	broken  error // why answers was closed; read it afterwards
	output  figures.Tail
	id      int
	kill    sync.Once
	exited  chan struct{}
	exit    error
	stopped bool
}

// StartDriver starts a program as a driver, in a process group of its own that ends with this
// process, with env beside the environment.
func StartDriver(name string, command, env []string) (*Driver, error) {
	theirIn, to, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	defer theirIn.Close()
	from, theirOut, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start %s: %w", name, err), to.Close())
	}
	defer theirOut.Close()
	d := &Driver{name: name, to: to, cmd: exec.Command(command[0], command[1:]...),
		answers: make(chan Answer), exited: make(chan struct{})}
	d.cmd.Env = append(d.cmd.Environ(), env...)
	d.cmd.ExtraFiles = []*os.File{theirIn, theirOut} // requestsFD, answersFD
	d.cmd.Stdout, d.cmd.Stderr = &d.output, &d.output
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	d.cmd.WaitDelay = time.Second // for a grandchild that holds the output
	if err := d.cmd.Start(); err != nil {
		return nil, errors.Join(fmt.Errorf("start %s: %w", name, err), to.Close(), from.Close())
	}
	go d.read(from)
	return d, nil
}

// read takes answers until the driver closes its end or writes nonsense, then reaps it.
func (d *Driver) read(from *os.File) {
	lines := bufio.NewScanner(from)
	lines.Buffer(nil, answerMax)
	for lines.Scan() {
		var a Answer
		if err := json.Unmarshal(lines.Bytes(), &a); err != nil {
			d.broken = fmt.Errorf("%w: %.80q: %w", ErrNonsense, lines.Text(), err)
			break
		}
		d.answers <- a
	}
	if err := lines.Err(); err != nil && d.broken == nil {
		d.broken = fmt.Errorf("%w: %w", ErrNonsense, err)
	}
	if d.broken != nil {
		d.signal(unix.SIGKILL)
	}
	from.Close()
	d.exit = d.cmd.Wait()
	close(d.exited)
	close(d.answers)
}

// PID is the driver's process.
func (d *Driver) PID() int { return d.cmd.Process.Pid }

// Ask sends a request and returns the answer. limit bounds both; a driver that exceeds it
// hangs and is killed.
func (d *Driver) Ask(ctx context.Context, r Request, limit time.Duration) (Answer, error) {
	if err := d.Send(r, limit); err != nil {
		return Answer{}, err
	}
	return d.Await(ctx, r.Do, limit)
}

// Send sends a request without waiting for the answer.
func (d *Driver) Send(r Request, limit time.Duration) error {
	d.id++
	r.ID = d.id
	line, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("%s: ask for %s: %w", d.name, r.Do, err)
	}
	_ = d.to.SetWriteDeadline(time.Now().Add(limit)) // a pipe takes one
	if _, err := d.to.Write(append(line, '\n')); err != nil {
		d.Kill()
		return fmt.Errorf("%s: ask for %s: %w%s", d.name, r.Do, errors.Join(ErrDied, err),
			d.lastLine())
	}
	return nil
}

// Await returns the answer to the last request.
func (d *Driver) Await(ctx context.Context, do string, limit time.Duration) (Answer, error) {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return Answer{}, context.Cause(ctx)
	case <-timer.C:
		d.Kill()
		return Answer{}, fmt.Errorf("%s: %s: %w (%v)", d.name, do, ErrHung, limit)
	case a, ok := <-d.answers:
		switch {
		case !ok:
			return Answer{}, d.death(do)
		case a.ID != d.id:
			d.Kill()
			return Answer{}, fmt.Errorf("%s: %s: answer %d to request %d: %w", d.name, do, a.ID,
				d.id, ErrNonsense)
		case a.Unsupported != "":
			return Answer{}, fmt.Errorf("%s: %w", a.Unsupported, ErrUnsupported)
		case a.Error != "":
			return Answer{}, fmt.Errorf("%s: %s: %s", d.name, do, a.Error)
		}
		return a, nil
	}
}

func (d *Driver) death(do string) error {
	if d.broken != nil {
		return fmt.Errorf("%s: %s: %w", d.name, do, d.broken)
	}
	how := "without an error"
	if d.exit != nil {
		how = d.exit.Error()
	}
	return fmt.Errorf("%s: %s: %w: %s%s", d.name, do, ErrDied, how, d.lastLine())
}

// lastLine is the last line that the driver printed, in brackets.
func (d *Driver) lastLine() string {
	lines := strings.Split(strings.TrimSpace(string(d.output.Bytes())), "\n")
	if last := lines[len(lines)-1]; last != "" {
		return fmt.Sprintf(" (it said %.200q)", last)
	}
	return ""
}

// Kill ends the driver and returns when it is gone. Any goroutine may, more than once.
func (d *Driver) Kill() {
	d.kill.Do(func() {
		d.signal(unix.SIGKILL)
		go func() {
			for range d.answers { // which are not needed
			}
		}()
	})
	<-d.exited
	d.to.Close()
}

// Close asks the driver to end, by the end of its requests, and kills it after grace.
func (d *Driver) Close(grace time.Duration) {
	d.Resume()
	d.to.Close()
	select {
	case <-d.exited:
	case <-time.After(grace):
	}
	d.Kill()
}

// Stop freezes the driver as a debugger would.
func (d *Driver) Stop() {
	if !d.stopped {
		d.signal(unix.SIGSTOP)
		d.stopped = true
	}
}

// Resume continues it.
func (d *Driver) Resume() {
	if d.stopped {
		d.signal(unix.SIGCONT)
		d.stopped = false
	}
}

// signal reaches the whole group, which is the driver's own until it has been reaped.
func (d *Driver) signal(s syscall.Signal) {
	select {
	case <-d.exited:
	default:
		_ = unix.Kill(-d.PID(), s) // the only error is that it has ended already
	}
}

// CPU is the time that the process has taken of processors so far; 0 for one that has
// ended. What programs that it started take is not in it.
func (d *Driver) CPU() time.Duration {
	var ts unix.Timespec
	clock := int32(^d.PID())<<3 | 2 // as clock_getcpuclockid makes it: CPUCLOCK_SCHED of a process
	if err := unix.ClockGettime(clock, &ts); err != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}
