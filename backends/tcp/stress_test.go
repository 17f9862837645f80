// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/freeze"
)

// stressFor is how long each stress runs; they say their seed.
var stressFor = flag.Duration("stress", 3*time.Second, "how long each stress of tcp runs")

const (
	moversVariable = "SLUICE_TCP_TEST_MOVERS"
	movers         = 4
	plotBytes      = 4 << 20
	untouched      = 0x5A
)

func upTo(r *rand.Rand, most time.Duration) time.Duration {
	return time.Duration(r.Int64N(int64(most)))
}

var blank = bytes.Repeat([]byte{untouched}, plotBytes)

// late counts bytes that a transfer of before has put where all was untouched.
func late(mem []byte) int { return len(mem) - bytes.Count(mem, blank[:1]) }

// disturb changes a network at random, loses for a while all that goes one way, or cuts it at
// one end or both, politely or not.
func (x *network) disturb(r *rand.Rand) {
	x.delay.Store(int64(upTo(r, 60*time.Millisecond)))
	x.rate.Store(0)
	switch r.IntN(7) {
	case 0:
		x.rate.Store(1<<20 + r.Int64N(8<<20))
	case 1:
		x.cut()
	case 6: // longer than Grace, and than Failure of some
		x.lost[r.IntN(2)].Store(clock() + int64(upTo(r, 800*time.Millisecond)))
	case 2, 3: // one end alone: what is on its way still arrives at the other
		x.mu.Lock()
		defer x.mu.Unlock()
		for i, c := range x.conns {
			tcp, ok := c.(*net.TCPConn)
			if ok && i%2 == r.IntN(2) {
				_ = tcp.SetLinger(r.IntN(2) - 1)
				_ = tcp.Close()
			}
		}
	}
}

// randomBatch is a write or a read of all of a plot, in one of several shapes.
func randomBatch(r *rand.Rand, op driver.Op, local, remote uint32) *driver.Batch {
	b := &driver.Batch{Op: op}
	switch r.IntN(3) {
	case 0:
		b.Descs = []driver.Desc{{Len: plotBytes, LocalKey: local, RemoteKey: remote}}
	case 1:
		const run = 1000
		g := &driver.Pattern{Run: run, Count: plotBytes / run, LocalKey: local, RemoteKey: remote}
		g.Local, g.Remote = driver.Side{Stride: run}, driver.Side{Stride: run}
		for _, i := range r.Perm(g.Count) {
			g.Remote.List = append(g.Remote.List, uint32(i))
		}
		b.Pattern = g
	default:
		at := r.Uint64N(plotBytes / 2)
		b.Descs = []driver.Desc{{Local: at, Remote: at, Len: 1 + r.Uint64N(plotBytes/2),
			LocalKey: local, RemoteKey: remote}}
	}
	if op == driver.Write && r.IntN(3) == 0 {
		b.Tail, b.Counter = driver.CountTail, 7
	}
	return b
}

// Transfers end by Cancel, by Close, or by the loss of the network, while it delays, throttles,
// and is cut at either end. Once all of a peer's have ended, not a byte of them lands.
func TestStressEndsAreFinal(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	owner := open(t, Config{Grace: 100 * time.Millisecond, Failure: 500 * time.Millisecond})
	var all sync.WaitGroup
	var rounds atomic.Int64
	end := time.Now().Add(*stressFor)
	for i := range uint64(movers) {
		all.Go(func() {
			r := rand.New(rand.NewPCG(seed, i))
			near := open(t, Config{Grace: 100 * time.Millisecond, CloseMax: time.Millisecond,
				Failure: 500 * time.Millisecond})
			far, away := share(t, owner, plotBytes)
			m, local := share(t, near, plotBytes)
			x := newNetwork(t, owner)
			for time.Now().Before(end) && !t.Failed() {
				endsOnce(t, r, near, x, far, m.key, away, local)
				rounds.Add(1)
			}
		})
	}
	all.Wait()
	t.Logf("%d rounds", rounds.Load())
}

func endsOnce(t *testing.T, r *rand.Rand, near *Backend, x *network, far *memory, key uint32, away,
	local []byte) {
	x.delay.Store(0)
	x.rate.Store(0)
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	connected, err := near.Connect(ctx, x.addr)
	if err != nil {
		return // the network was cut behind us
	}
	p := connected.(*peer)
	token, _ := far.AppendToken(nil)
	remote, _, err := p.Import(token)
	op := []driver.Op{driver.Write, driver.Read}[r.IntN(2)]
	from, to := local, away
	if op == driver.Read {
		from, to = away, local
	}
	fill(from, byte(r.IntN(untouched)))
	tags := uint64(0)
	for ; err == nil && tags < 4; tags++ {
		if err = p.Submit(tags, randomBatch(r, op, key, remote)); err != nil {
			break
		}
	}
	time.Sleep(upTo(r, 10*time.Millisecond))
	x.disturb(r)
	time.Sleep(upTo(r, 10*time.Millisecond))
	if r.IntN(2) == 0 {
		for tag := range tags {
			p.Cancel(tag)
		}
	} else {
		_ = p.Close()
	}
	var done [4]driver.Completion
	ended := uint64(0)
	for until := time.Now().Add(limit); ended < tags &&
		time.Now().Before(until); time.Sleep(50 * time.Microsecond) {
		n, _ := near.Poll(done[:])
		ended += uint64(n)
	}
	if ended < tags {
		t.Errorf("%d of %d transfers have ended", ended, tags)
	}
	copy(to, blank) // at once: what lands late must not be covered
	time.Sleep(upTo(r, 120*time.Millisecond))
	if n := late(to); n > 0 {
		t.Errorf("%d bytes of a %v landed after its end", n, op)
	}
	_ = p.Close()
}

// Movers in another process, which is stopped and continued, write by way of a network that
// delays, throttles and is cut. Once a fence has returned, not a byte lands by an earlier token.
func TestStressFences(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	owner := open(t, Config{Grace: 30 * time.Millisecond, Failure: 2 * time.Second})
	child := startMovers(t)
	var all sync.WaitGroup
	var rounds atomic.Int64
	end := time.Now().Add(*stressFor)
	over := make(chan struct{})
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		child.stopAtRandom(rand.New(rand.NewPCG(seed, movers)), over)
	}()
	for i := range uint64(movers) {
		all.Go(func() {
			r := rand.New(rand.NewPCG(seed, i))
			m, mem := share(t, owner, plotBytes)
			x := newNetwork(t, owner)
			more := func() bool { // on a busy machine the movers may take that long to begin
				now := time.Now()
				return now.Before(end) || rounds.Load() == 0 && now.Before(end.Add(limit))
			}
			for more() && !t.Failed() {
				if fenceOnce(t, r, owner, child, int(i), x, m, mem) {
					rounds.Add(1)
				}
			}
		})
	}
	all.Wait()
	close(over)
	<-stopped
	t.Logf("%d fences while bytes landed", rounds.Load())
	require.NotZero(t, rounds.Load())
}

// fenceOnce reports whether bytes were landing when the fence came.
func fenceOnce(t *testing.T, r *rand.Rand, owner *Backend, child *moverProcess, i int, x *network,
	m *memory, mem []byte) bool {
	copy(mem[:4096], blank)
	token, err := m.AppendToken(nil)
	if err != nil {
		t.Error(err)
		return false
	}
	x.delay.Store(0)
	x.rate.Store(0)
	child.order(i, x.addr, token)
	landed := false
	for until := clock() + int64(500*time.Millisecond); !landed &&
		clock() < until; time.Sleep(time.Millisecond) {
		m.gate.Lock() // the look is between two pieces
		landed = late(mem[:4096]) > 0
		m.gate.Unlock()
	}
	x.disturb(r)
	time.Sleep(upTo(r, 5*time.Millisecond))
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	if err := owner.Fence(ctx, m.key); err != nil {
		t.Errorf("fence: %v", err)
	}
	copy(mem, blank) // at once: what lands late must not be covered
	time.Sleep(upTo(r, 20*time.Millisecond))
	if n := late(mem); n > 0 {
		t.Errorf("%d bytes landed after a fence", n)
	}
	return landed
}

// moverProcess is a process that writes wherever it is told.
type moverProcess struct {
	cmd *exec.Cmd
	mu  sync.Mutex
	in  io.WriteCloser
}

func startMovers(t *testing.T) *moverProcess {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	c := &moverProcess{cmd: exec.Command(exe)}
	c.cmd.Env = append(os.Environ(), moversVariable+"=1", "GORACE=atexit_sleep_ms=0")
	c.cmd.Stderr = os.Stderr
	c.in, err = c.cmd.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, c.cmd.Start())
	t.Cleanup(func() {
		_ = freeze.Thaw(c.cmd.Process)
		_ = c.in.Close()
		_ = c.cmd.Wait()
	})
	return c
}

func (c *moverProcess) order(i int, addr, token []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, _ = fmt.Fprintf(c.in, "%d %x %x\n", i, addr, token)
}

func (c *moverProcess) stopAtRandom(r *rand.Rand, over chan struct{}) {
	for {
		for _, f := range []func(*os.Process) error{freeze.Process, freeze.Thaw} {
			select {
			case <-over:
				_ = freeze.Thaw(c.cmd.Process)
				return
			case <-time.After(upTo(r, 60*time.Millisecond)):
				_ = f(c.cmd.Process)
			}
		}
	}
}

// serveMovers is the other process: each mover writes by its latest order until its input ends.
func serveMovers() error {
	var orders [movers]atomic.Pointer[[2][]byte]
	stop := make(chan struct{})
	var all sync.WaitGroup
	for i := range orders {
		all.Go(func() { _ = move(&orders[i], stop, uint64(i)) })
	}
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		word := strings.Fields(lines.Text())
		addr, err1 := hex.DecodeString(word[1])
		token, err2 := hex.DecodeString(word[2])
		if err1 == nil && err2 == nil {
			orders[word[0][0]-'0'].Store(&[2][]byte{addr, token})
		}
	}
	close(stop)
	all.Wait()
	return lines.Err()
}

// move connects anew for each order, and whenever its peer is lost.
func move(orders *atomic.Pointer[[2][]byte], stop chan struct{}, seed uint64) error {
	b, err := New(Config{Plaintext: true, Listen: "127.0.0.1:0", Grace: 30 * time.Millisecond,
		CloseMax: 10 * time.Millisecond})
	if err != nil {
		return err
	}
	defer b.Close()
	mem := make([]byte, plotBytes)
	m, err := b.Register(driver.Segment{Kind: driver.DRAM, Len: plotBytes, Mem: mem})
	if err != nil {
		return err
	}
	r := rand.New(rand.NewPCG(seed, seed))
	for {
		select {
		case <-stop:
			return nil
		default:
			time.Sleep(time.Millisecond)
		}
		if o := orders.Load(); o != nil {
			moveBy(b, r, o, orders, m.Key())
		}
	}
}

func moveBy(b *Backend, r *rand.Rand, o *[2][]byte, orders *atomic.Pointer[[2][]byte],
	local uint32) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	p, err := b.Connect(ctx, o[0])
	if err != nil {
		return
	}
	defer p.Close()
	remote, _, err := p.Import(o[1])
	var done [8]driver.Completion
	for tag := uint64(0); err == nil; {
		if err = p.Submit(tag, randomBatch(r, driver.Write, local, remote)); err == nil {
			tag++
		}
		if tag >= 8 { // let some of them end
			time.Sleep(100 * time.Microsecond)
		}
		for n, _ := b.Poll(done[:]); n > 0; n, _ = b.Poll(done[:]) {
			for _, c := range done[:n] {
				if c.Err != nil && orders.Load() != o {
					return // revoked, and there is another order
				}
			}
		}
	}
}
