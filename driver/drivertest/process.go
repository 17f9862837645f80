// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sluicehq/sluice/internal/testing/freeze"
)

// process is the second process, as its parent sees it.
type process struct {
	cmd     *exec.Cmd
	limit   time.Duration
	orders  io.WriteCloser
	answers chan reply // closed at the end of the process's output
	stderr  syncBuffer
	exited  chan struct{}
	status  error // of the exit; written before exited is closed
	killed  bool

	turn sync.Mutex // one order at a time
}

// errGone answers orders to a process that has ended.
var errGone = errors.New("the second process has ended")

// startProcess starts the test binary once more, as the far side of a harness.
// It ends with the test.
func startProcess(tb testing.TB, h Harness) *process {
	tb.Helper()
	if !mainCalled {
		tb.Fatal("checks between two processes: call drivertest.Main in TestMain")
	}
	exe, err := os.Executable()
	if err != nil {
		tb.Fatalf("find the test binary: %v", err)
	}
	p := &process{
		cmd: exec.Command(exe), limit: h.Limit,
		answers: make(chan reply, 1), exited: make(chan struct{}),
	}
	// The race detector would have the process linger for a second.
	p.cmd.Env = append(os.Environ(), childVariable+"="+h.Name,
		"GORACE="+os.Getenv("GORACE")+" atexit_sleep_ms=0")
	p.cmd.Stderr = &p.stderr
	p.orders, err = p.cmd.StdinPipe()
	if err != nil {
		tb.Fatalf("start the second process: %v", err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		tb.Fatalf("start the second process: %v", err)
	}
	if err := h.Start(p.cmd); err != nil {
		tb.Fatalf("start the second process: %v", err)
	}
	go p.listen(out)
	tb.Cleanup(func() { p.end(tb) })
	return p
}

// listen reads answers until the output ends, then collects the process: Wait
// must not close the pipe before that.
func (p *process) listen(out io.Reader) {
	defer close(p.exited)
	for lines := json.NewDecoder(out); ; {
		var r reply
		if lines.Decode(&r) != nil {
			break
		}
		p.answers <- r
	}
	close(p.answers)
	p.status = p.cmd.Wait()
}

// do implements party.
func (p *process) do(q request) reply {
	p.turn.Lock()
	defer p.turn.Unlock()
	line, err := json.Marshal(q)
	if err != nil {
		return reply{Err: relay(err)}
	}
	if _, err := p.orders.Write(append(line, '\n')); err != nil {
		return reply{Err: relay(fmt.Errorf("%w: %w", errGone, err))}
	}
	select {
	case r, ok := <-p.answers:
		if !ok {
			return reply{Err: relay(fmt.Errorf("%w; it wrote: %s", errGone, p.stderr.String()))}
		}
		return r
	case <-time.After(p.limit + q.Limit + time.Second):
		p.dump()
		text := p.stderr.String()
		return reply{Err: relay(fmt.Errorf("order %q: %w; the second process wrote: %s", q.Do,
			errLate, text))}
	}
}

// dump makes the process print its goroutines and end.
func (p *process) dump() {
	_ = p.cmd.Process.Signal(syscall.SIGCONT)
	_ = p.cmd.Process.Signal(syscall.SIGQUIT)
	select {
	case <-p.exited:
	case <-time.After(2 * time.Second):
	}
}

// freeze stops every thread of the process and returns when they all stand.
func (p *process) freeze() error { return freeze.Process(p.cmd.Process) }

// thaw lets a frozen process go on.
func (p *process) thaw() error { return freeze.Thaw(p.cmd.Process) }

// kill ends the process without a word and returns when it is gone.
func (p *process) kill() error {
	p.killed = true
	if err := p.cmd.Process.Kill(); err != nil {
		return fmt.Errorf("kill the second process: %w", err)
	}
	return p.gone()
}

func (p *process) gone() error {
	select {
	case <-p.exited:
		return nil
	case <-time.After(p.limit):
		return fmt.Errorf("wait for the second process to end: %w", errLate)
	}
}

// end is the cleanup: an end of input makes a healthy process leave.
func (p *process) end(tb testing.TB) {
	_ = p.orders.Close()
	select {
	case <-p.exited:
	case <-time.After(10 * time.Second):
		tb.Errorf("the second process does not end with its input (%v)", p.kill())
	}
	text := p.stderr.String()
	if p.status != nil && !p.killed || strings.Contains(text, "DATA RACE") {
		tb.Errorf("the second process ended badly (%v)", p.status)
	}
	if text != "" {
		tb.Logf("the second process wrote:\n%s", text)
	}
}

// syncBuffer is a buffer that one goroutine may read while another writes.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
