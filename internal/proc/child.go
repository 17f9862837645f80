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

// AliveEvery is how often a child tells its parent that it is alive.
const AliveEvery = 500 * time.Millisecond

// The control pipes of a child, which it inherits: messages from the parent and to it.
const (
	fdIn  = 3
	fdOut = 4
)

// Control is the child's end of its connection to the parent. Messages are lines of JSON.
type Control struct {
	out    writer
	in     chan Message
	ctx    context.Context
	cancel context.CancelCauseFunc
}

// ErrParentGone is the cause of a Control's context when the parent has closed the control pipe, or
// has ended.
var ErrParentGone = errors.New("the parent process ended")

// Attach opens the control pipes of a child. It returns an error in a process that was not started
// by this package.
func Attach() (*Control, error) {
	// Check the descriptors before an os.File owns them: in a process that another program has
	// started they may be anything.
	for _, fd := range []int{fdIn, fdOut} {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFIFO {
			return nil, errors.New("this command is started by sluice itself, not by hand")
		}
	}
	in, out := os.NewFile(fdIn, "control-in"), os.NewFile(fdOut, "control-out")
	c := &Control{out: writer{to: out}, in: make(chan Message, 16)}
	c.ctx, c.cancel = context.WithCancelCause(context.Background())
	go c.read(in)
	go c.sendAlive()
	return c, nil
}

// Context ends when the parent closes the control pipe, or has ended.
func (c *Control) Context() context.Context { return c.ctx }

// Messages delivers the messages of the parent. The channel is closed when the pipe is.
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

// sendAlive tells the parent, every AliveEvery, that this process is not stopped. It ends when
// Context does.
func (c *Control) sendAlive() {
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
	KindAlive = "alive" // child to parent, every AliveEvery
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
