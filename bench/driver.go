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

// The errors of drivers.
var (
	ErrHung        = errors.New("no answer in time")
	ErrNonsense    = errors.New("the answer is none")
	ErrDied        = errors.New("the driver ended")
	ErrUnsupported = errors.New("not supported")
)

// Driver is the running process of one end of a participant. Only one goroutine may call its
// methods at a time, except Kill.
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

// StartDriver starts a program as a driver, with env added to the environment. The driver has its
// own process group and is killed when this process ends.
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

// read reads answers until the driver closes its end or writes a malformed line. Then it reaps the
// process.
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

// PID returns the driver's process ID.
func (d *Driver) PID() int { return d.cmd.Process.Pid }

// Ask sends a request and returns the answer. A driver that takes longer than limit counts as hung
// and is killed.
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

// lastLine returns the last line that the driver printed, in brackets.
func (d *Driver) lastLine() string {
	lines := strings.Split(strings.TrimSpace(string(d.output.Bytes())), "\n")
	if last := lines[len(lines)-1]; last != "" {
		return fmt.Sprintf(" (it said %.200q)", last)
	}
	return ""
}

// Kill kills the driver and returns when it is gone. Any goroutine may call it, more than once.
func (d *Driver) Kill() {
	d.kill.Do(func() {
		d.signal(unix.SIGKILL)
		go func() {
			for range d.answers { // discard them, so that read can end
			}
		}()
	})
	<-d.exited
	d.to.Close()
}

// Close closes the pipe of requests, which asks the driver to end, and kills it after grace.
func (d *Driver) Close(grace time.Duration) {
	d.Resume()
	d.to.Close()
	select {
	case <-d.exited:
	case <-time.After(grace):
	}
	d.Kill()
}

// Stop suspends the driver's processes.
func (d *Driver) Stop() {
	if !d.stopped {
		d.signal(unix.SIGSTOP)
		d.stopped = true
	}
}

// Resume continues them.
func (d *Driver) Resume() {
	if d.stopped {
		d.signal(unix.SIGCONT)
		d.stopped = false
	}
}

// signal signals the driver's process group, unless the driver has been reaped.
func (d *Driver) signal(s syscall.Signal) {
	select {
	case <-d.exited:
	default:
		_ = unix.Kill(-d.PID(), s) // the only error is that it has ended already
	}
}

// CPU returns the CPU time that the process has used so far; 0 if it has ended. It does not count
// the programs that the process has started.
func (d *Driver) CPU() time.Duration {
	var ts unix.Timespec
	clock := int32(^d.PID())<<3 | 2 // as clock_getcpuclockid makes it: CPUCLOCK_SCHED of a process
	if err := unix.ClockGettime(clock, &ts); err != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}
