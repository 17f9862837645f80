// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"bufio"
	"encoding/hex"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// stressFor is how long each stress runs; they say their seed.
var stressFor = flag.Duration("stress", 3*time.Second, "how long each stress of tcp runs")

const moversVariable = "SLUICE_TCP_TEST_MOVERS"

// soakStress runs by the host's clock, with a seed of its own.
func soakStress(t *testing.T, cfg Config) *stress {
	seed, end := rand.Uint64(), time.Now().Add(*stressFor)
	t.Logf("seed %d", seed)
	return &stress{clock: clock.Host(), scale: 1, seed: seed, cfg: cfg,
		more: func() bool { return time.Now().Before(end) }}
}

// TestSoakStressEndsAreFinal is TestStressEndsAreFinal by the clock.
func TestSoakStressEndsAreFinal(t *testing.T) {
	soakStress(t, Config{Grace: 100 * time.Millisecond, CloseMax: time.Millisecond,
		Failure: 500 * time.Millisecond}).endsAreFinal(t)
}

// TestSoakStressRevokes is TestStressRevokes by the clock, with movers in another process, which is
// stopped and continued.
func TestSoakStressRevokes(t *testing.T) {
	s := soakStress(t, Config{Grace: 30 * time.Millisecond, Failure: 2 * time.Second})
	inTime := s.more
	end := time.Now().Add(*stressFor + limit)
	s.more = func() bool { // the movers of a busy machine take long to begin
		return inTime() || s.landed.Load() == 0 && time.Now().Before(end)
	}
	child := startMovers(t)
	over, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		child.stopAtRandom(rand.New(rand.NewPCG(s.seed, movers)), over)
	}()
	s.revokes(t, 500*time.Millisecond, child.order)
	close(over)
	<-stopped
	t.Logf("%d revokes while bytes landed", s.landed.Load())
	require.NotZero(t, s.landed.Load())
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
		_ = testkit.Thaw(c.cmd.Process)
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
		for _, f := range []func(*os.Process) error{testkit.Freeze, testkit.Thaw} {
			select {
			case <-over:
				_ = testkit.Thaw(c.cmd.Process)
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
		all.Go(func() {
			if err := moveAlone(&orders[i], stop, uint64(i)); err != nil {
				fmt.Fprintln(os.Stderr, err)
			}
		})
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

// moveAlone is move with a backend of its own.
func moveAlone(orders *atomic.Pointer[[2][]byte], stop chan struct{}, seed uint64) error {
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
	move(b, m.Key(), orders, stop, seed)
	return nil
}
