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
	Kind     string        `json:",omitempty"` // of memory
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
	Spot     string        `json:",omitempty"`
	Limit    time.Duration `json:",omitempty"`
}

// reply is the answer to one request.
type reply struct {
	ID       int       `json:",omitempty"`
	Key      uint32    `json:",omitempty"`
	Len      uint64    `json:",omitempty"`
	Tag      uint64    `json:",omitempty"`
	Sum      uint32    `json:",omitempty"`
	Count    int       `json:",omitempty"`
	Data     []byte    `json:",omitempty"`
	Messages []message `json:",omitempty"`
	Faults   []string  `json:",omitempty"`
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

// requests are what a host can do.
var requests = map[string]func(*host, *request) (reply, error){
	"addr": func(h *host, q *request) (reply, error) { return reply{Data: h.b.Addr()}, nil },
	"allocate": func(h *host, q *request) (reply, error) {
		id, err := h.allocate(q.Kind, q.Len)
		return reply{ID: id}, err
	},
	"spoil": func(h *host, q *request) (reply, error) { return reply{}, h.spoils[q.ID]() },
	"free":  func(h *host, q *request) (reply, error) { return reply{}, h.free(q.ID) },
	"fill": func(h *host, q *request) (reply, error) {
		return reply{}, h.space(q.ID).set(q.Off, pattern(make([]byte, q.Len), q.Seed))
	},
	"sum": func(h *host, q *request) (reply, error) {
		p, err := h.space(q.ID).get(q.Off, q.Len)
		return reply{Sum: sum(p)}, err
	},
	"get": func(h *host, q *request) (reply, error) {
		p, err := h.space(q.ID).get(q.Off, q.Len)
		return reply{Data: p}, err
	},
	"register": func(h *host, q *request) (reply, error) {
		id, err := h.register(q)
		if err != nil {
			return reply{}, err
		}
		token, err := h.region(id).mem.AppendToken(nil)
		return reply{ID: id, Key: h.region(id).mem.Key(), Data: token}, err
	},
	"revoke": func(h *host, q *request) (reply, error) {
		ctx, cancel := context.WithTimeout(context.Background(), q.Limit)
		defer cancel()
		if q.Over {
			cancel()
		}
		return reply{}, within(h.h.limit+q.Limit, func() error {
			return h.region(q.ID).mem.Revoke(ctx)
		})
	},
	"connect": func(h *host, q *request) (reply, error) {
		id, err := h.connect(q.Data, q.Limit)
		return reply{ID: id}, err
	},
	"import": func(h *host, q *request) (reply, error) {
		key, size, err := h.peer(q.Peer).Import(q.Data)
		return reply{Key: key, Len: size}, err
	},
	"drop": func(h *host, q *request) (reply, error) {
		h.peer(q.Peer).Drop(q.Key)
		return reply{}, nil
	},
	"submit": func(h *host, q *request) (reply, error) {
		tag, err := h.submit(h.peer(q.Peer), q.Batch)
		return reply{Tag: tag}, err
	},
	"await": func(h *host, q *request) (reply, error) { return reply{}, h.await(q.Tag) },
	"cancel": func(h *host, q *request) (reply, error) {
		h.peer(q.Peer).Cancel(q.Tag)
		return reply{}, nil
	},
	"close peer": func(h *host, q *request) (reply, error) {
		return reply{}, within(q.Limit, h.peer(q.Peer).Close)
	},
	"close backend": func(h *host, q *request) (reply, error) {
		return reply{}, within(q.Limit, h.b.Close)
	},
	"receive": func(h *host, q *request) (reply, error) {
		msgs, err := h.receive(q.Count, q.Limit, q.Asleep)
		return reply{Messages: msgs}, err
	},
	"answer": func(h *host, q *request) (reply, error) { return reply{}, h.answer(q.Conn, q.Data) },
	"flood": func(h *host, q *request) (reply, error) {
		h.flood(h.peer(q.Peer), q.Batch)
		return reply{}, nil
	},
	"storm": func(h *host, q *request) (reply, error) { return reply{}, h.storm(q) },
	"echo":  func(h *host, _ *request) (reply, error) { h.echo(); return reply{}, nil },
	"end": func(h *host, q *request) (reply, error) { // of what runs beside
		n, err := h.finish(q.Count > 0)
		return reply{Count: n}, err
	},
	"park":    func(h *host, q *request) (reply, error) { h.park(q.Spot); return reply{}, nil },
	"parked":  func(h *host, _ *request) (reply, error) { return reply{}, h.parked() },
	"proceed": func(h *host, _ *request) (reply, error) { h.proceed(); return reply{}, nil },
}

// do obeys one request.
func (h *host) do(q request) reply {
	if q.Limit == 0 {
		q.Limit = h.h.limit
	}
	r, err := requests[q.Do](h, &q)
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

// Is reports whether the original was target.
func (e *relayed) Is(target error) bool {
	return slices.ContainsFunc(e.Kinds, func(i int) bool { return sentinels[i] == target })
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
	leaks := &recorder{}
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
			checkLeaks(leaks, &h)
			var err error
			side, err = newHost(&h)
			r.Err = relay(err)
		case "close":
			r.Faults = append(side.close(), leaks.end(func(f func()) { f() })...)
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
	replies chan reply // closed at the end of the process's output
	stderr  lockedBuffer
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
			return reply{Err: relay(fmt.Errorf("%w; it wrote: %s", errGone, p.stderr.String()))}
		}
		return r
	case <-time.After(2*p.limit + q.Limit):
		_ = p.thaw()
		_ = p.cmd.Process.Signal(syscall.SIGQUIT) // prints its goroutines
		_ = within(2*time.Second, p.gone)
		return reply{Err: relay(fmt.Errorf("request %q: %w; the second process wrote: %s", q.Do,
			errLate, p.stderr.String()))}
	}
}

// freeze stops every thread of the process, and returns when they all stand.
func (p *process) freeze() error { return testkit.Freeze(p.cmd.Process) }

// thaw lets a frozen process go on.
func (p *process) thaw() error { return testkit.Thaw(p.cmd.Process) }

// kill ends the process without a word, and returns when it is gone.
func (p *process) kill() error {
	p.killed = true
	if err := p.cmd.Process.Kill(); err != nil {
		return fmt.Errorf("kill the second process: %w", err)
	}
	return within(p.limit, p.gone)
}

func (p *process) gone() error { <-p.exited; return nil }

// end makes a healthy process leave: its input ends.
func (p *process) end(tb testing.TB) {
	_ = p.in.Close()
	if within(p.limit, p.gone) != nil {
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

// lockedBuffer is a buffer that one goroutine may read while another writes.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
