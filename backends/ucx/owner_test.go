// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// ownerVariable makes the test binary the owner of memory, with a Config in JSON. It says "address
// token", and obeys each line of its input with a line of output: see serveOwner.
const ownerVariable = "SLUICE_UCX_TEST_OWNER"

const ownerBytes = 1 << 20

func serveOwner(spec string) int {
	var cfg Config
	must(json.Unmarshal([]byte(spec), &cfg))
	b, err := New(cfg)
	must(err)
	defer b.Close()
	mem := make([]byte, ownerBytes)
	m, err := b.Register(driver.Segment{Kind: driver.DRAM, Len: ownerBytes, Mem: mem,
		Secret: [16]byte{1}})
	must(err)
	tok, err := m.AppendToken(nil)
	must(err)
	fmt.Printf("%x %x\n", b.Addr(), tok)
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		switch lines.Text() {
		case "fence": // its memory
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			fmt.Println(m.Revoke(ctx))
			cancel()
		case "landed": // how many bytes of its memory are not zero
			fmt.Println(ownerBytes - bytes.Count(mem, []byte{0}))
		case "clear":
			clear(mem)
			fmt.Println(nil)
		case "lost": // waits for the last word of a connection
			var msgs [1]driver.Message
			for msgs[0].Err == nil {
				_, err := b.Receive(msgs[:])
				must(err)
				time.Sleep(time.Millisecond)
			}
			fmt.Println(msgs[0].Err)
		}
	}
	return 0
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

// owner is such a process, and a backend of ours that writes to it.
type owner struct {
	t    *testing.T
	cmd  *exec.Cmd
	in   io.Writer
	out  *bufio.Scanner
	addr []byte
	tok  []byte

	b    *Backend
	mem  driver.Memory
	from []byte
	tag  uint64
}

// onLoopback has a backend reach peers over TCP and the loopback device.
func onLoopback(cfg Config) Config {
	cfg.Transports, cfg.Devices = "tcp", "lo"
	return cfg
}

// openBackend opens a backend. The test closes it.
func openBackend(t *testing.T, cfg Config) *Backend {
	t.Helper()
	b, err := New(cfg)
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
		t.Fatal(err)
	}
	return b
}

// startOwner starts an owner with a Config of its own, and opens our backend.
func startOwner(t *testing.T, ours, owners Config, start func(*exec.Cmd) error) *owner {
	t.Helper()
	o := &owner{t: t, b: openBackend(t, ours), from: make([]byte, ownerBytes)}
	spec, err := json.Marshal(owners)
	require.NoError(t, err)
	exe, err := os.Executable() // a name that other processes find as well
	require.NoError(t, err)
	o.cmd = exec.Command(exe)
	o.cmd.Env = append(os.Environ(), ownerVariable+"="+string(spec))
	o.cmd.Stderr = os.Stderr
	in, err := o.cmd.StdinPipe()
	require.NoError(t, err)
	out, err := o.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, start(o.cmd))
	o.in, o.out = in, bufio.NewScanner(out)
	t.Cleanup(func() {
		_ = o.cmd.Process.Kill()
		_ = o.cmd.Wait()
		_ = o.b.Close()
	})
	addr, tok, _ := strings.Cut(o.line(), " ")
	o.addr, _ = hex.DecodeString(addr)
	o.tok, _ = hex.DecodeString(tok)
	for i := range o.from {
		o.from[i] = byte(i) | 1
	}
	o.mem, err = o.b.Register(driver.Segment{Kind: driver.DRAM, Len: ownerBytes, Mem: o.from,
		Secret: [16]byte{2}})
	require.NoError(t, err)
	return o
}

func (o *owner) line() string {
	o.t.Helper()
	require.True(o.t, o.out.Scan(), "the owner has died")
	return o.out.Text()
}

// landed is how many bytes there are in its memory.
func (o *owner) landed() (n int) {
	o.t.Helper()
	_, _ = fmt.Fprintln(o.in, "landed")
	_, err := fmt.Sscan(o.line(), &n)
	require.NoError(o.t, err)
	return n
}

// keeps fails the test if other than n bytes are there: more have landed than may.
func (o *owner) keeps(n int, what string) {
	o.t.Helper()
	if landed := o.landed(); landed != n {
		testkit.FatalBroken(o.t, "%s: %d bytes are there, want %d", what, landed, n)
	}
}

// does has the owner obey, and expects an answer.
func (o *owner) does(order, want string) {
	o.t.Helper()
	_, _ = fmt.Fprintln(o.in, order)
	require.Equal(o.t, want, o.line())
}

func (o *owner) fence() { o.t.Helper(); o.does("fence", "<nil>") }

func (o *owner) connect() (driver.Peer, uint32) {
	o.t.Helper()
	p, key, err := o.tryConnect()
	require.NoError(o.t, err)
	return p, key
}

func (o *owner) tryConnect() (p driver.Peer, key uint32, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if p, err = o.b.Connect(ctx, o.addr); err == nil {
		key, _, err = p.Import(o.tok)
	}
	return p, key, err
}

// write submits n bytes at an offset.
func (o *owner) write(p driver.Peer, key uint32, off, n uint64) {
	o.t.Helper()
	o.tag++
	d := []driver.Desc{{Local: off, Remote: off, Len: n, LocalKey: o.mem.Key(), RemoteKey: key}}
	require.NoError(o.t, p.Submit(o.tag, &driver.Batch{Op: driver.Write, Descs: d}))
}

func (o *owner) outcome() error {
	o.t.Helper()
	var done [1]driver.Completion
	for end := time.Now().Add(30 * time.Second); ; {
		n, err := o.b.Poll(done[:])
		require.NoError(o.t, err)
		if n == 1 {
			require.Equal(o.t, o.tag, done[0].Tag)
			return done[0].Err
		}
		require.True(o.t, time.Now().Before(end), "a batch does not complete")
	}
}

func (o *owner) freeze() { o.t.Helper(); require.NoError(o.t, testkit.Freeze(o.cmd.Process)) }
func (o *owner) thaw()   { o.t.Helper(); require.NoError(o.t, testkit.Thaw(o.cmd.Process)) }

// settle returns when the owner has handled what came before it was thawed: another connection
// works.
func (o *owner) settle(off uint64) {
	o.t.Helper()
	p, _ := o.reach(off, 1)
	require.NoError(o.t, p.Close())
}

// reach returns a connection by which a write has succeeded. An owner that a busy machine has
// stand still for Failure is lost: then the next one is tried.
func (o *owner) reach(off, n uint64) (driver.Peer, uint32) {
	o.t.Helper()
	for end := time.Now().Add(patience); ; {
		p, key, err := o.tryConnect()
		if err == nil {
			o.write(p, key, off, n)
			err = o.outcome()
		}
		if err == nil {
			return p, key
		}
		require.ErrorIs(o.t, err, driver.ErrPeerLost)
		require.True(o.t, time.Now().Before(end), "no write succeeds")
		if p != nil {
			require.NoError(o.t, p.Close())
		}
	}
}
