// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// began is the time from which silence is counted. It has a monotonic reading, so that setting the
// clock of the host does not matter.
var began = time.Now()

// Child is a running part of the command. Send, Stop, Heard and Exit may be
// called by any goroutine.
type Child struct {
	Name string
	PID  int

	out    writer
	toIt   *os.File
	cmd    *exec.Cmd
	msgs   chan Message
	heard  atomic.Int64 // nanoseconds since began
	exited chan struct{}
	stop   sync.Once
	killed atomic.Bool // by Stop
	exit   error       // set before exited is closed
}

// StartChild runs this executable with args.
func StartChild(name string, args []string) (*Child, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("start %s process: %w", name, err)
	}
	theirIn, toIt, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start %s process: %w", name, err)
	}
	defer theirIn.Close()
	fromIt, theirOut, err := os.Pipe()
	if err != nil {
		toIt.Close()
		return nil, fmt.Errorf("start %s process: %w", name, err)
	}
	defer theirOut.Close()
	cmd := exec.Command(exe, args...)
	cmd.Stderr = os.Stderr
	cmd.ExtraFiles = []*os.File{theirIn, theirOut}
	// The kernel ends the child with the thread that started it; threads of a Go
	// program end with the program, unless a locked goroutine ends. A process
	// group of its own keeps the terminal's Ctrl-C for the parent, which then
	// ends its children in order.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := cmd.Start(); err != nil {
		toIt.Close()
		fromIt.Close()
		return nil, fmt.Errorf("start %s process: %w", name, err)
	}
	c := &Child{Name: name, PID: cmd.Process.Pid, out: writer{to: toIt}, toIt: toIt, cmd: cmd,
		msgs: make(chan Message, 64), exited: make(chan struct{})}
	c.Excuse()
	go c.read(fromIt)
	return c, nil
}

// read takes messages until the child closes its end, then reaps it.
func (c *Child) read(from *os.File) {
	lines := json.NewDecoder(bufio.NewReader(io.Reader(from)))
	for {
		var m Message
		if lines.Decode(&m) != nil {
			break
		}
		c.Excuse()
		if m.Kind != KindAlive {
			c.msgs <- m
		}
	}
	from.Close()
	c.exit = c.cmd.Wait()
	close(c.exited)
	close(c.msgs)
}

// Messages delivers what the child sends, and is closed after the child has
// been reaped. It must be received from, or the child stops.
func (c *Child) Messages() <-chan Message { return c.msgs }

// Send sends a message to the child.
func (c *Child) Send(kind string, body any) error { return c.out.send(kind, body) }

// Silent returns for how long the child has said nothing.
func (c *Child) Silent() time.Duration {
	return time.Since(began) - time.Duration(c.heard.Load())
}

// Stopped reports whether the child is stopped now, as by SIGSTOP or a debugger.
func (c *Child) Stopped() bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", c.PID))
	if err != nil {
		return false
	}
	// The state follows the name of the command, which may hold anything but ends the brackets.
	_, state, _ := bytes.Cut(stat[bytes.LastIndexByte(stat, ')')+1:], []byte(" "))
	return len(state) > 0 && (state[0] == 'T' || state[0] == 't')
}

// Excuse begins the time of Silent anew: for a parent that did not listen itself.
func (c *Child) Excuse() { c.heard.Store(int64(time.Since(began))) }

// Exited is closed once the child has been reaped.
func (c *Child) Exited() <-chan struct{} { return c.exited }

// ExitError says how the child ended; nil when it ended well or by Stop. It is
// meaningful after Exited is closed.
func (c *Child) ExitError() error {
	if c.exit == nil || c.killed.Load() {
		return nil
	}
	return fmt.Errorf("%s process (pid %d) died: %w", c.Name, c.PID, c.exit)
}

// Stop asks the child to end by closing its control pipe, kills it when grace is
// over, and returns when it has been reaped. Messages that are not received are
// thrown away. It may be called more than once.
func (c *Child) Stop(grace time.Duration) {
	c.stop.Do(func() { c.toIt.Close() })
	deadline := time.NewTimer(grace)
	defer deadline.Stop()
	for {
		select {
		case <-c.exited:
			return
		case _, ok := <-c.msgs:
			if !ok {
				<-c.exited
				return
			}
		case <-deadline.C:
			c.killed.Store(true)
			c.cmd.Process.Kill() // the only error is that it has ended already
		}
	}
}
