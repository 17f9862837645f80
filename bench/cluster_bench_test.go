// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/fault"
	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

// The cluster that these benchmarks model: a node with eight rails of 400 Gb/s and 64
// peers, eight to a rail. Rates are those of package fault over mem, and time runs slower
// by dilation, so that one machine can move the bytes and its timers are exact enough.
const (
	clusterRails = 8
	clusterPeers = 64
	dilation     = 1000
	railRate     = 50e9 / dilation // bytes a second
	sliceBytes   = 256 << 10
	burstSlices  = 4        // that each peer has for us at once
	urgentBytes  = 64 << 10 // of a transfer that somebody waits for
)

// cluster is the node and its peers.
type cluster struct {
	testing.TB
	node    *engine.Engine
	local   *engine.Region
	peers   []*engine.Peer
	remotes []*engine.Remote
}

func newCluster(tb testing.TB, rules []fault.Rule) *cluster {
	tb.Helper()
	c := &cluster{TB: tb}
	const n = clusterPeers * burstSlices * sliceBytes
	c.node, c.local = c.open("node", n, rules)
	for i := range clusterPeers {
		e, _ := c.open(fmt.Sprint("peer-", i), burstSlices*sliceBytes, nil)
		d, err := e.Describe()
		c.check(err)
		p, err := c.node.Connect(context.Background(), d)
		c.check(err)
		m, err := p.Remote("kv")
		c.check(err)
		c.peers, c.remotes = append(c.peers, p), append(c.remotes, m)
	}
	return c
}

func (c *cluster) check(err error) {
	c.Helper()
	require.NoError(c, err)
}

func (c *cluster) open(name string, n uint64, rules []fault.Rule) (*engine.Engine, *engine.Region) {
	c.Helper()
	inner, err := mem.New(mem.Config{})
	c.check(err)
	b, err := fault.Wrap(inner, 0, rules...)
	c.check(err)
	e, err := engine.Open(engine.Config{Name: name, Backends: []driver.Backend{b},
		PeersMax: 2 * clusterPeers})
	c.check(err)
	c.Cleanup(func() { _ = e.Close() })
	m, err := e.Alloc(n, engine.AllocOptions{Purpose: "cluster"})
	c.check(err)
	c.Cleanup(func() { _ = m.Close() })
	r, err := e.Register("kv", m.Segment())
	c.check(err)
	return e, r
}

// read makes a transfer of a slice of a peer.
func (c *cluster) read(peer, slice int, n uint64) *engine.Transfer {
	c.Helper()
	t, err := c.node.NewTransfer(c.peers[peer], engine.Read, engine.Route{})
	c.check(err)
	c.Cleanup(func() { _ = t.Close() })
	at := uint64(slice) * sliceBytes
	c.check(t.Add(c.local, uint64(peer)*burstSlices*sliceBytes+at, c.remotes[peer], at, n))
	return t
}

func (c *cluster) wait(t *engine.Transfer) {
	if err := t.Wait(context.Background()); err != nil {
		c.Error(err)
	}
}

// BenchmarkClusterPosts is how many transfers a second the engine itself takes to 64 peers,
// from Post to Wait: 8 bytes each, one in flight to each peer, by one goroutine. By the
// processor time that one costs, it reports the cores that it takes to fill the rails with
// transfers of 64 KiB and of 1 MiB.
func BenchmarkClusterPosts(b *testing.B) {
	c := newCluster(b, nil)
	var list []*engine.Transfer
	for i := range clusterPeers {
		list = append(list, c.read(i, 0, 8))
	}
	begin, cpu := time.Now(), processTime()
	posts := 0
	for b.Loop() {
		for _, t := range list {
			c.check(t.Post())
		}
		for _, t := range list {
			c.wait(t)
		}
		posts += len(list)
	}
	took := time.Since(begin)
	each := float64(processTime()-cpu) / float64(posts)
	b.ReportMetric(float64(posts)/took.Seconds(), "posts/s")
	b.ReportMetric(each, "cpu-ns/post")
	b.ReportMetric(clusterRails*50e9/(64<<10)*each/1e9, "cores-for-64KiB")
	b.ReportMetric(clusterRails*50e9/(1<<20)*each/1e9, "cores-for-1MiB")
}

// BenchmarkClusterTail has all peers send a burst at once, and now and then a transfer that
// somebody waits for. First all slices are posted at once, and the rails serve them in
// order; then no rail has more than two slices at a time, which is what priorities in the
// engine would come to. Both take turns. Reported are microseconds of the modelled cluster,
// for the urgent transfers, and for the burst as a whole.
func BenchmarkClusterTail(b *testing.B) {
	c := newCluster(b, railRules())
	var bulk [clusterRails][]*engine.Transfer
	for slice := range burstSlices {
		for peer := range clusterPeers {
			bulk[railOf(peer)] = append(bulk[railOf(peer)], c.read(peer, slice, sliceBytes))
		}
	}
	urgent := make([]*engine.Transfer, clusterPeers)
	for i := range urgent {
		urgent[i] = c.read(i, 0, urgentBytes)
	}
	windows := []int{len(bulk[0]), 2}
	tails, bursts := make([][]time.Duration, 2), make([][]time.Duration, 2)
	random := rand.New(rand.NewPCG(1, 1))
	for n := 0; b.Loop(); n++ {
		way := n % 2
		took, tail := c.burst(&bulk, windows[way], urgent, random)
		bursts[way], tails[way] = append(bursts[way], took), append(tails[way], tail...)
	}
	for way, name := range []string{"in-order", "two-a-rail"} {
		if len(bursts[way]) == 0 {
			continue
		}
		b.ReportMetric(quantileUs(tails[way], 0.5), name+"-p50-us")
		b.ReportMetric(quantileUs(tails[way], 0.99), name+"-p99-us")
		b.ReportMetric(quantileUs(bursts[way], 0.5), name+"-burst-us")
	}
}

func railOf(peer int) int { return peer * clusterRails / clusterPeers }

// railRules have the peers of each rail share its rate.
func railRules() (list []fault.Rule) {
	const each = clusterPeers / clusterRails
	for rail := range uint64(clusterRails) {
		ofRail := func(peer uint64) bool { return peer/each == rail }
		list = append(list, fault.Rule{On: fault.Read, Peer: ofRail, Do: fault.Limit(railRate, 0)})
	}
	return list
}

// burst runs one, and returns how long it took and how long the urgent transfers beside it.
func (c *cluster) burst(bulk *[clusterRails][]*engine.Transfer, window int,
	urgent []*engine.Transfer, random *rand.Rand) (took time.Duration, tail []time.Duration) {
	begin := time.Now()
	var rails, waiters sync.WaitGroup
	for _, list := range bulk {
		rails.Go(func() { c.serve(list, window) })
	}
	done := make(chan struct{})
	go func() { rails.Wait(); close(done) }()
	var mu sync.Mutex
	for _, i := range random.Perm(len(urgent)) {
		select {
		case <-done:
		case <-time.After(2 * time.Millisecond):
			waiters.Go(func() {
				posted := time.Now()
				if err := urgent[i].Post(); err != nil {
					c.Error(err)
					return
				}
				c.wait(urgent[i])
				mu.Lock()
				defer mu.Unlock()
				tail = append(tail, time.Since(posted))
			})
		}
	}
	<-done
	took = time.Since(begin)
	waiters.Wait()
	return took, tail
}

// serve posts the slices of a rail, at most window of them at a time.
func (c *cluster) serve(list []*engine.Transfer, window int) {
	for i, t := range list {
		if i >= window {
			c.wait(list[i-window])
		}
		if err := t.Post(); err != nil {
			c.Error(err)
			return
		}
	}
	for _, t := range list[max(0, len(list)-window):] {
		c.wait(t)
	}
}

// quantileUs is a quantile in microseconds of the modelled cluster.
func quantileUs(list []time.Duration, q float64) float64 {
	if len(list) == 0 {
		return 0
	}
	slices.Sort(list)
	at := list[min(len(list)-1, int(q*float64(len(list))))]
	return float64(at) / dilation / float64(time.Microsecond)
}
