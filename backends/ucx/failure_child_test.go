// SPDX-License-Identifier: Apache-2.0

package ucx_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/testing/freeze"
)

// childVariable makes the test binary the other side of a test of failure; its value
// is a sideConfig.
const childVariable = "SLUICE_UCX_TEST_SIDE"

// init is where a process finds out that it is such a child: TestMain knows others.
func init() {
	if config, ok := os.LookupEnv(childVariable); ok {
		os.Exit(serveSide(config))
	}
}

// order is a line to the child, answer the line that it says to it.
type order struct {
	Do   string
	Data []byte
	What int
	For  time.Duration
	But  int
}

type answer struct {
	Data  []byte
	Token []byte
	At    time.Duration // uptime
	Where []uint64      // the child's kv and src
	Err   string
}

func serveSide(config string) int {
	var c sideConfig
	if err := json.Unmarshal([]byte(config), &c); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	s, err := newSide(c)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	out := json.NewEncoder(os.Stdout)
	for in := json.NewDecoder(os.Stdin); ; {
		var o order
		if in.Decode(&o) != nil {
			break
		}
		a, err := s.obey(&o)
		if err != nil {
			a.Err = err.Error()
		}
		if out.Encode(a) != nil {
			break
		}
	}
	if err := s.close(); err != nil {
		fmt.Fprintln(os.Stderr, "close:", err)
		return 1
	}
	return 0
}

func (s *side) obey(o *order) (a answer, err error) {
	switch o.Do {
	case "describe":
		a.Where = []uint64{place(s.kv.Bytes()), place(s.src.Bytes())}
		a.Data, err = s.e.Describe()
	case "grant":
		a.Token, err = s.grant()
	case "connect":
		err = s.connect(o.Data)
	case "start":
		err = s.start(o.Data)
	case "outcome":
		if s.flood != nil {
			a.At, err = s.flood.outcome()
		}
	case "lastWord":
		a.At, err = s.lastWord()
	case "hangUp":
		err = s.peer.Close()
		a.At = uptime()
	case "poison":
		s.poison(o.What)
	case "watch":
		err = s.watch(o.What, o.For, o.But)
	default:
		err = fmt.Errorf("order %q is unknown", o.Do)
	}
	return a, err
}

// place is where memory outside the Go heap lies.
func place(b []byte) uint64 {
	at, _ := strconv.ParseUint(strings.TrimPrefix(fmt.Sprintf("%p", b), "0x"), 16, 64)
	return at
}

// child is the other side.
type child struct {
	t      *testing.T
	cmd    *exec.Cmd
	in     *json.Encoder
	out    chan answer // closed when the process says no more
	where  []uint64
	killed bool
}

// startChild starts it where start does so. The end of the test ends it.
func startChild(t *testing.T, c sideConfig, start func(*exec.Cmd) error) *child {
	t.Helper()
	config, err := json.Marshal(c)
	require.NoError(t, err)
	cmd := exec.Command(program(t))
	cmd.Env = append(os.Environ(), childVariable+"="+string(config), "GORACE="+os.Getenv("GORACE")+
		" atexit_sleep_ms=0")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, start(cmd))
	p := &child{t: t, cmd: cmd, in: json.NewEncoder(in), out: make(chan answer, 1)}
	ended := make(chan error, 1)
	go func() { ended <- p.listen(out) }()
	t.Cleanup(func() { p.end(in, ended) })
	return p
}

func (p *child) listen(out io.Reader) error {
	for lines := json.NewDecoder(out); ; {
		var a answer
		if lines.Decode(&a) != nil {
			break
		}
		p.out <- a
	}
	close(p.out)
	return p.cmd.Wait()
}

func (p *child) end(in io.Closer, ended <-chan error) {
	_ = in.Close()
	select {
	case err := <-ended:
		if err != nil && !p.killed {
			p.t.Errorf("the other side: %v", err)
		}
	case <-time.After(limit):
		p.t.Error("the other side does not end with its input")
		_ = p.cmd.Process.Kill()
		<-ended
	}
}

// try gives an order and returns the answer.
func (p *child) try(o order) (answer, error) {
	p.t.Helper()
	if err := p.in.Encode(o); err != nil {
		return answer{}, err
	}
	select {
	case a, ok := <-p.out:
		switch {
		case !ok:
			return a, errors.New("the other side has ended")
		case a.Err != "":
			return a, errors.New(a.Err)
		}
		return a, nil
	case <-time.After(2 * limit):
		_ = p.cmd.Process.Signal(syscall.SIGQUIT)
		return answer{}, fmt.Errorf("no answer within %v", 2*limit)
	}
}

// do gives an order that must not fail.
func (p *child) do(o order) answer {
	p.t.Helper()
	a, err := p.try(o)
	if err != nil {
		p.t.Fatalf("%s by the other side: %v", o.Do, err)
	}
	return a
}

func (p *child) kill() {
	p.t.Helper()
	p.killed = true
	require.NoError(p.t, p.cmd.Process.Kill())
}

// freeze stops every thread of it.
func (p *child) freeze() {
	p.t.Helper()
	require.NoError(p.t, freeze.Process(p.cmd.Process))
}

func (p *child) thaw() {
	p.t.Helper()
	require.NoError(p.t, freeze.Thaw(p.cmd.Process))
}

// poisonKV fills the kv of a process that is frozen.
func (p *child) poisonKV() {
	p.t.Helper()
	mem, err := os.OpenFile(fmt.Sprintf("/proc/%d/mem", p.cmd.Process.Pid), os.O_WRONLY, 0)
	require.NoError(p.t, err)
	defer mem.Close()
	b := make([]byte, sideBytes)
	fill(b, poisonKV)
	if _, err := mem.WriteAt(b, int64(p.where[0])); err != nil {
		p.t.Fatal(err)
	}
}
