// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// request is one order to a host. Which fields count depends on Do.
type request struct {
	Do       string
	ID       int           `json:",omitempty"` // of a region or a space
	Peer     int           `json:",omitempty"`
	Off      uint64        `json:",omitempty"`
	Len      uint64        `json:",omitempty"`
	Seed     uint64        `json:",omitempty"`
	Kind     string        `json:",omitempty"` // of memory, or a spot
	ReadOnly bool          `json:",omitempty"`
	Only     driver.Ranges `json:",omitempty"`
	Batch    *driver.Batch `json:",omitempty"`
	Tag      uint64        `json:",omitempty"`
	Key      uint32        `json:",omitempty"`
	Conn     uint64        `json:",omitempty"`
	Data     []byte        `json:",omitempty"` // an address, a token or a message
	Tokens   [][]byte      `json:",omitempty"`
	Count    int           `json:",omitempty"`
	Asleep   bool          `json:",omitempty"` // sleep where the engine would
	Over     bool          `json:",omitempty"` // with a context that is over
	Limit    time.Duration `json:",omitempty"`
}

// reply is the answer to one request.
type reply struct {
	ID       int       `json:",omitempty"`
	Addr     uintptr   `json:",omitempty"` // of memory that is mapped
	Key      uint32    `json:",omitempty"`
	Len      uint64    `json:",omitempty"`
	Tag      uint64    `json:",omitempty"`
	Sum      uint32    `json:",omitempty"`
	Data     []byte    `json:",omitempty"`
	Messages []message `json:",omitempty"`
	Breaches []string  `json:",omitempty"`
	Err      *relayed  `json:",omitempty"`
}

// message is a driver.Message, with what its receiver saw as it came.
type message struct {
	Conn uint64
	Data []byte // nil and empty differ in JSON, too
	Sum  uint32 `json:",omitempty"` // of the bytes that a voucher names
	Err  *relayed
}

// voucher is the beginning of a message that names bytes of a space: its receiver sums them up
// before it does anything else.
type voucher struct{ Space, Off, Len uint64 }

const voucherMark = "voucher "

func (v voucher) encode() []byte {
	return fmt.Appendf(nil, voucherMark+"%d %d %d", v.Space, v.Off, v.Len)
}

func (h *host) received(m driver.Message) message {
	got := message{Conn: m.Conn, Data: m.Data, Err: relay(m.Err)}
	var v voucher
	if text, ok := strings.CutPrefix(string(m.Data), voucherMark); ok {
		if _, err := fmt.Sscan(text, &v.Space, &v.Off, &v.Len); err == nil {
			p, err := h.space(int(v.Space)).get(v.Off, v.Len)
			got.Sum, got.Err = sum(p), relay(err)
		}
	}
	return got
}

// do obeys one request.
func (h *host) do(q request) (r reply) {
	if q.Limit == 0 {
		q.Limit = h.harness.limit
	}
	var err error
	switch q.Do {
	case "addr":
		r.Data = h.b.Addr()
	case "allocate":
		if r.ID, err = h.allocate(q.Kind, q.Len); err == nil {
			r.Addr = h.space(r.ID).addr()
		}
	case "spoil":
		err = h.space(q.ID).spoil()
	case "free":
		err = h.free(q.ID)
	case "fill":
		err = h.space(q.ID).set(q.Off, pattern(make([]byte, q.Len), q.Seed))
	case "sum":
		var p []byte
		p, err = h.space(q.ID).get(q.Off, q.Len)
		r.Sum = sum(p)
	case "get":
		r.Data, err = h.space(q.ID).get(q.Off, q.Len)
	case "register":
		if r.ID, err = h.register(&q); err == nil {
			m := h.region(r.ID).mem
			r.Key = m.Key()
			r.Data, err = m.AppendToken(nil)
		}
	case "revoke":
		ctx, cancel := context.WithTimeout(context.Background(), q.Limit)
		defer cancel()
		if q.Over {
			cancel()
		}
		m := h.region(q.ID).mem
		err = within(h.harness.limit+q.Limit, func() error { return m.Revoke(ctx) })
	case "connect":
		r.ID, err = h.connect(q.Data, q.Limit)
	case "import":
		r.Key, r.Len, err = h.peer(q.Peer).Import(q.Data)
	case "drop":
		h.peer(q.Peer).Drop(q.Key)
	case "submit":
		r.Tag, err = h.submit(h.peer(q.Peer), q.Batch)
	case "await":
		err = h.await(q.Tag)
	case "cancel":
		h.peer(q.Peer).Cancel(q.Tag)
	case "close peer":
		err = within(q.Limit, h.peer(q.Peer).Close)
	case "receive":
		r.Messages, err = h.receive(q.Count, q.Limit, q.Asleep)
	case "answer":
		err = h.answer(q.Conn, q.Data)
	case "flood":
		h.flood(h.peer(q.Peer), q.Batch)
	case "storm":
		err = h.storm(&q)
	case "echo":
		h.echo()
	case "end": // of what runs beside
		err = h.finish(false)
	case "park":
		h.park(q.Kind)
	case "parked":
		err = h.parked()
	case "proceed":
		h.proceed()
	default:
		err = fmt.Errorf("unknown request %q", q.Do)
	}
	r.Err = relay(err)
	return r
}

// relayed is an error on its way through a pipe: its text, and which sentinels it is.
type relayed struct {
	Text  string
	Kinds []int
}

var sentinels = []error{
	driver.ErrClosed, driver.ErrNotSupported, driver.ErrUnavailable, driver.ErrFull, driver.ErrBusy,
	driver.ErrBounds, driver.ErrPeerLost, driver.ErrAborted, driver.ErrRevoked, driver.ErrCorrupt,
	driver.ErrBadToken, driver.ErrReadOnly, driver.ErrTimeout, driver.ErrFault, driver.ErrUnproven,
	context.Canceled, context.DeadlineExceeded, errLate, errGone,
}

func relay(err error) *relayed {
	if err == nil {
		return nil
	}
	r := &relayed{Text: err.Error()}
	for i, s := range sentinels {
		if errors.Is(err, s) {
			r.Kinds = append(r.Kinds, i)
		}
	}
	return r
}

// Error returns the text of the original.
func (e *relayed) Error() string { return e.Text }

// Is reports whether the original was target. A nil one was none.
func (e *relayed) Is(target error) bool {
	return e != nil && slices.Contains(e.Kinds, slices.Index(sentinels, target))
}

func (e *relayed) orNil() error {
	if e == nil {
		return nil
	}
	return e
}

// childVariable makes a test binary the second process of the harness that it names.
const childVariable = "SLUICE_DRIVERTEST_CHILD"

// serve is the second process: it obeys requests from standard input, one line of JSON each.
func serve(name string, harnesses []Harness) error {
	i := slices.IndexFunc(harnesses, func(h Harness) bool { return h.withDefaults().Name == name })
	if i < 0 {
		return fmt.Errorf("Main was not given a harness named %q", name)
	}
	h := harnesses[i].withDefaults()
	var side *host
	var leaks func() []string
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var q request
		if err := in.Decode(&q); err == io.EOF {
			return nil
		} else if err != nil {
			return fmt.Errorf("read request: %w", err)
		}
		var r reply
		switch q.Do {
		case "open":
			leaks = h.leaks()
			var err error
			side, err = newHost(&h)
			r.Err = relay(err)
		case "close":
			r.Breaches = append(side.close(), leaks()...)
		default:
			r = side.do(q)
		}
		if err := out.Encode(r); err != nil {
			return fmt.Errorf("write reply: %w", err)
		}
	}
}

// process is the second process, as its parent sees it.
type process struct {
	cmd     *exec.Cmd
	limit   time.Duration
	in      io.WriteCloser
	replies chan reply   // closed at the end of the process's output
	stderr  bytes.Buffer // to be read when it has exited
	exited  chan struct{}
	status  error // of the exit; written before exited is closed
	killed  bool
	turn    sync.Mutex // one request at a time
}

var errGone = errors.New("the second process has ended")

// startProcess starts the test binary once more. The process ends with the test.
func startProcess(tb testing.TB, h *Harness) *process {
	tb.Helper()
	if !mainCalled {
		tb.Fatal("checks between two processes: call drivertest.Main in TestMain")
	}
	exe, err := os.Executable()
	if err != nil {
		tb.Fatalf("find the test binary: %v", err)
	}
	p := &process{cmd: exec.Command(exe), limit: h.limit, replies: make(chan reply, 1),
		exited: make(chan struct{})}
	// The race detector would have the process linger for a second.
	p.cmd.Env = append(os.Environ(), childVariable+"="+h.Name,
		"GORACE="+os.Getenv("GORACE")+" atexit_sleep_ms=0")
	p.cmd.Stderr = &p.stderr
	var out io.ReadCloser
	if p.in, err = p.cmd.StdinPipe(); err == nil {
		if out, err = p.cmd.StdoutPipe(); err == nil {
			err = h.Start(p.cmd)
		}
	}
	if err != nil {
		tb.Fatalf("start the second process: %v", err)
	}
	go func() {
		defer close(p.exited)
		lines := json.NewDecoder(out)
		for r := (reply{}); lines.Decode(&r) == nil; r = (reply{}) {
			p.replies <- r
		}
		close(p.replies)
		p.status = p.cmd.Wait()
	}()
	tb.Cleanup(func() { p.end(tb) })
	return p
}

func (p *process) do(q request) reply {
	p.turn.Lock()
	defer p.turn.Unlock()
	line, err := json.Marshal(q)
	if err != nil {
		return reply{Err: relay(err)}
	}
	if _, err := p.in.Write(append(line, '\n')); err != nil {
		return reply{Err: relay(fmt.Errorf("%w: %w", errGone, err))}
	}
	select {
	case r, ok := <-p.replies:
		if !ok {
			return reply{Err: relay(fmt.Errorf("%w; it wrote: %s", errGone, p.wrote()))}
		}
		return r
	case <-time.After(2*p.limit + q.Limit):
		_ = p.thaw()
		_ = p.cmd.Process.Signal(syscall.SIGQUIT) // prints its goroutines
		return reply{Err: relay(fmt.Errorf("request %q: %w; the second process wrote: %s", q.Do,
			errLate, p.wrote()))}
	}
}

// freeze stops every thread of the process, and returns when they all stand.
func (p *process) freeze() error { return testkit.Freeze(p.cmd.Process) }

// thaw lets a frozen process go on.
func (p *process) thaw() error { return testkit.Thaw(p.cmd.Process) }

// read copies memory of the process, which may stand still.
func (p *process) read(to []byte, from uintptr) error {
	local := []unix.Iovec{{Base: &to[0]}}
	local[0].SetLen(len(to))
	n, err := unix.ProcessVMReadv(p.cmd.Process.Pid, local,
		[]unix.RemoteIovec{{Base: from, Len: len(to)}}, 0)
	if err == nil && n < len(to) {
		err = io.ErrUnexpectedEOF
	}
	return err
}

// kill ends the process without a word, and returns when it is gone.
func (p *process) kill() error {
	p.killed = true
	if err := p.cmd.Process.Kill(); err != nil {
		return fmt.Errorf("kill the second process: %w", err)
	}
	return within(p.limit, p.gone)
}

func (p *process) gone() error { <-p.exited; return nil }

// wrote returns the output of a process, once it has exited.
func (p *process) wrote() string {
	if within(2*time.Second, p.gone) != nil {
		return "it has not exited"
	}
	return p.stderr.String()
}

// end makes a healthy process leave: its input ends.
func (p *process) end(tb testing.TB) {
	_ = p.in.Close()
	if within(p.limit, p.gone) != nil {
		tb.Errorf("the second process does not end with its input (%v)", p.kill())
	}
	text := p.wrote()
	if p.status != nil && !p.killed || strings.Contains(text, "DATA RACE") {
		tb.Errorf("the second process ended badly (%v)", p.status)
	}
	if text != "" {
		tb.Logf("the second process wrote:\n%s", text)
	}
}
