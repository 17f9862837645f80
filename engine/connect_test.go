// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// way is a backend whose Connect takes a while, and may not be in time the first times.
type way struct {
	*fake
	takes time.Duration
	late  int // so many first tries end with ErrTimeout although the context lasts
	tries int
}

func (w *way) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	w.tries++
	if w.tries <= w.late {
		return nil, fmt.Errorf("no answer: %w", driver.ErrTimeout)
	}
	select {
	case <-time.After(w.takes):
		return w.fake.Connect(ctx, addr)
	case <-ctx.Done():
		return nil, fmt.Errorf("no answer: %w", driver.ContextError(ctx))
	}
}

// TestConnectByWhatAnswers: a backend that is not answered does not keep the others waiting, and
// one that is answered late connects where it is the only one.
func TestConnectByWhatAnswers(t *testing.T) {
	const never = 1000 * time.Hour
	for name, c := range map[string]struct {
		ways  []*way
		took  time.Duration // at most
		tries []int
	}{
		"the second": {[]*way{{takes: never}, {}}, 5 * time.Second, []int{1, 1}},
		"the first":  {[]*way{{}, {takes: never}}, 5 * time.Second, []int{1, 1}},
		"both late, one not": {[]*way{{takes: never}, {takes: 8 * time.Second}},
			28*time.Second + retryPause,
			[]int{2, 2}},
		"the only one":       {[]*way{{takes: 29 * time.Second}}, 29 * time.Second, []int{1}},
		"a limit of its own": {[]*way{{late: 3}}, time.Second, []int{4}},
		"none":               {[]*way{{takes: never}}, 30 * time.Second, []int{1}},
	} {
		testkit.RunInVirtualTime(t, name, func(t *testing.T) {
			var list []driver.Backend
			for i, w := range c.ways {
				w.fake = &fake{name: fmt.Sprint("way", i)}
				list = append(list, w)
			}
			e := open(t, "e", func(cfg *Config) { cfg.Backends = list })
			far := open(t, "far", func(cfg *Config) {
				cfg.Backends = nil
				for i := range c.ways {
					cfg.Backends = append(cfg.Backends, &fake{name: fmt.Sprint("way", i)})
				}
			})
			description, err := far.Describe()
			require.NoError(t, err)
			began := time.Now()
			p, err := e.Connect(t.Context(), description)
			require.LessOrEqual(t, time.Since(began), c.took)
			for i, w := range c.ways {
				require.Equal(t, c.tries[i], w.tries, "way %d", i)
			}
			if name == "none" {
				require.ErrorIs(t, err, ErrTimeout)
				require.ErrorIs(t, err, ErrNoRoute)
				return
			}
			require.NoError(t, err)
			require.NoError(t, p.Close())
		})
	}
}

// late is a listener that hangs up on the first ones a little later.
type late struct {
	net.Listener
	left int
}

func (l *late) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil || l.left == 0 {
			return c, err
		}
		l.left--
		go func() {
			time.Sleep(2 * immediateClose)
			_ = c.Close()
		}()
	}
}

// TestDialComesAgain: a server that hung up, and one that had not started, are dialled again.
func TestDialComesAgain(t *testing.T) {
	testkit.CheckLeaks(t)
	e, far := open(t, "e"), open(t, "far")
	socket := filepath.Join(t.TempDir(), "socket")
	dialled := make(chan error, 1)
	go func() {
		p, err := e.Dial(t.Context(), "unix", socket)
		if err == nil {
			err = p.Close()
		}
		dialled <- err
	}()
	time.Sleep(50 * time.Millisecond) // so that it finds nobody, most often
	l, err := net.Listen("unix", socket)
	require.NoError(t, err)
	serve(t, far, &late{l, 2})
	require.NoError(t, <-dialled)
}

// TestServeByWhatAnswers: backends that do not answer an engine that serves leave time of the
// exchange to the others.
func TestServeByWhatAnswers(t *testing.T) {
	testkit.CheckLeaks(t)
	near := open(t, "near", func(c *Config) {
		c.Backends = []driver.Backend{&fake{name: "way0"}, &fake{name: "way1"},
			&fake{name: "way2"}}
	})
	far := open(t, "far", func(c *Config) {
		c.HandshakeTimeout = 4 * time.Second
		c.Backends = []driver.Backend{&way{fake: &fake{name: "way0"}, takes: time.Hour},
			&way{fake: &fake{name: "way1"}, takes: time.Hour}, &fake{name: "way2"}}
	})
	p, err := near.Dial(t.Context(), "unix", serveUnix(t, far))
	require.NoError(t, err)
	require.NoError(t, p.Close())
}

// TestWhatIsDialledAgain: what may pass, and an end of the stream only where the server had time to
// want it.
func TestWhatIsDialledAgain(t *testing.T) {
	for _, c := range []struct {
		err           error
		hungUp, again bool
	}{
		{unix.ECONNREFUSED, false, true}, // no process listens
		{unix.ENOENT, false, true},       // nor has ever
		{unix.EAGAIN, false, true},       // the queue of a Unix socket is full
		{io.EOF, true, true},
		{io.EOF, false, false},
		{unix.EACCES, true, false},
		{ErrCorrupt, true, false},
	} {
		err := &OpError{Op: "dial", Err: c.err}
		require.Equal(t, c.again, isRetryable(err, c.hungUp), "%v, %v", c.err, c.hungUp)
	}
}
