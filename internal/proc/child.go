// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// AliveEvery is how often a child says that it is alive.
const AliveEvery = 500 * time.Millisecond

// The descriptors of a child.
const (
	fdIn  = 3
	fdOut = 4
)

// Control is the child's end of the way to its parent.
type Control struct {
	out    writer
	in     chan Message
	ctx    context.Context
	cancel context.CancelCauseFunc
}

// ErrParentGone is the cause of a Control's context when the parent closed the
// control pipe or is no more.
var ErrParentGone = errors.New("the parent process ended")

// Attach opens the control channel of a child. It fails in a process that was
// not started by this package.
func Attach() (*Control, error) {
	for _, fd := range []int{fdIn, fdOut} { // an os.File would own what may be another's
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFIFO {
			return nil, errors.New("this command is started by sluice itself, not by hand")
		}
	}
	in, out := os.NewFile(fdIn, "control-in"), os.NewFile(fdOut, "control-out")
	c := &Control{out: writer{to: out}, in: make(chan Message, 16)}
	c.ctx, c.cancel = context.WithCancelCause(context.Background())
	go c.read(in)
	go c.beat()
	return c, nil
}

// Context ends when the parent wants this process to end, or is gone.
func (c *Control) Context() context.Context { return c.ctx }

// Messages delivers what the parent sends; it is closed when the pipe is.
func (c *Control) Messages() <-chan Message { return c.in }

// Send sends a message to the parent. Any goroutine may.
func (c *Control) Send(kind string, body any) error { return c.out.send(kind, body) }

// Expect waits for the next message, which must be of that kind, and reads its
// body into v unless v is nil.
func (c *Control) Expect(kind string, v any) error {
	m, ok := <-c.in
	if !ok {
		return ErrParentGone
	}
	if m.Kind != kind {
		return fmt.Errorf("parent sent %q, want %q", m.Kind, kind)
	}
	if v == nil {
		return nil
	}
	return m.Decode(v)
}

func (c *Control) read(in io.Reader) {
	defer close(c.in)
	defer c.cancel(ErrParentGone)
	lines := json.NewDecoder(bufio.NewReader(in))
	for {
		var m Message
		if lines.Decode(&m) != nil {
			return
		}
		c.in <- m
	}
}

// beat tells the parent that this process is not stopped. It ends with the
// process: a child has nothing else to do than its one command.
func (c *Control) beat() {
	tick := time.NewTicker(AliveEvery)
	defer tick.Stop()
	for {
		select {
		case <-c.ctx.Done():
			return
		case <-tick.C:
			if c.Send(KindAlive, nil) != nil {
				return
			}
		}
	}
}

// Message is one line between parent and child.
type Message struct {
	Kind string          `json:"kind"`
	Body json.RawMessage `json:"body,omitempty"`
}

// The kinds that this package uses itself; all others belong to the commands.
const (
	KindAlive = "alive" // child to parent, each AliveEvery
	KindError = "error" // child to parent: the last message of a child that fails
)

// Decode reads the body into v.
func (m *Message) Decode(v any) error {
	if err := json.Unmarshal(m.Body, v); err != nil {
		return fmt.Errorf("read %q message: %w", m.Kind, err)
	}
	return nil
}

// writer sends messages; any goroutine may.
type writer struct {
	mu sync.Mutex
	to io.Writer
}

func (w *writer) send(kind string, body any) error {
	m := Message{Kind: kind}
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return fmt.Errorf("write %q message: %w", kind, err)
		}
		m.Body = b
	}
	line, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("write %q message: %w", kind, err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, err := w.to.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("write %q message: %w", kind, err)
	}
	return nil
}
