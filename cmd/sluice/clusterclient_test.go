// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	enc "encoding/binary" // the tests have a variable of that name
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"slices"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/serve"
	"github.com/sluicehq/sluice/kv/cluster"
	"github.com/sluicehq/sluice/kv/cluster/placement"
	"github.com/sluicehq/sluice/kv/trace"
)

// asClient makes the test binary a client of TestClusterFaults; it has a clientSetup in JSON.
const asClient = "SLUICE_TEST_CLUSTER_CLIENT"

const (
	clientBlock  = 8 << 10 // bytes
	clientRoom   = 64      // blocks that a client has memory for
	clientLimit  = 3 * time.Second
	requestMost  = 48 // blocks of a request
	ledgerChains = 16
	ledgerKeys   = 16 // of a chain: segments of 1, 1, 2, 4 and 8 blocks
	resting      = 0x55
)

// ledgers are namespaces of blocks that are stored in the beginning and read ever since, and how
// many copies of each they have.
var ledgers = map[string]int{"single": 1, "double": 2}

// clientSetup is what a client is told. The first one stores the ledgers.
type clientSetup struct {
	Number, Nodes int
	Seed          uint64
	Etcd          []string
	Address       string
}

// clientReport is what a client has seen. Its last fields are of the command that it answers.
type clientReport struct {
	Ops, Hits int
	Wrong     int           // blocks that were Done and had other bytes
	Landed    int           // slots that were written to after their call had ended
	Over      time.Duration // the most that an operation took beyond its limit
	Error     string        // the first that no fault explains
	Nodes     map[string]cluster.State
	Trouble   string
	Missing   map[string]int // blocks of the ledgers: of single ones by their node, and "double"
}

// traceClient is a process that serves a model: it handles the requests of a trace, one by one, and
// obeys its standard input in between.
type traceClient struct {
	clientSetup
	*clusterUser
	report clientReport
	memory []byte
	region *engine.Region
	spaces map[string]*cluster.Space
	bids   []placement.Node
}

func runTraceClient(setup string) (err error) {
	c := &traceClient{spaces: map[string]*cluster.Space{}}
	if err := json.Unmarshal([]byte(setup), &c.clientSetup); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), faultPatience)
	defer cancel()
	for name, copies := range ledgers {
		if c.Number == 0 {
			err = errors.Join(err, putNamespace(ctx, c.Etcd[0], name,
				fmt.Sprintf(`{"copies":%d,"priority":7}`, copies)))
		}
	}
	err = errors.Join(err, putNamespace(ctx, c.Etcd[0], "trace", `{"memory_quota":4194304}`))
	if err != nil {
		return err
	}
	flags := clusterFlags{etcd: c.Etcd}
	if err := flags.backend.Set("tcp:plaintext=true,listen=" + c.Address + ":0"); err != nil {
		return err
	}
	if c.clusterUser, err = flags.open(ctx, fmt.Sprint("client ", c.Number)); err != nil {
		return err
	}
	m, err := c.engine.Alloc(clientRoom*clientBlock, engine.AllocOptions{})
	if err != nil {
		return err
	}
	c.memory = m.Bytes()
	c.rest()
	if c.region, err = c.engine.RegisterPrivate("blocks", m.Segment()); err != nil {
		return err
	}
	if err := c.Attach(ctx, c.region); err != nil {
		return err
	}
	for _, name := range append(slices.Collect(maps.Keys(ledgers)), "trace") {
		if c.spaces[name], err = c.Namespace(ctx, name, [32]byte{}); err != nil {
			return err
		}
	}
	for k := range c.clientSetup.Nodes {
		sum := sha256.Sum256([]byte(faultNodeName(k)))
		c.bids = append(c.bids, placement.Node{ID: enc.LittleEndian.Uint64(sum[:]), Weight: 1})
	}
	commands := make(chan string)
	go func() {
		for s := bufio.NewScanner(os.Stdin); s.Scan(); {
			commands <- s.Text()
		}
		close(commands)
	}()
	requests := trace.NewGenerator(c.Seed) // of all clients: each has half of them
	for {
		select {
		case what, more := <-commands:
			if !more {
				return io.ErrUnexpectedEOF // the test is gone
			}
			c.obey(what)
			if err := json.NewEncoder(os.Stdout).Encode(&c.report); err != nil || what == "end" {
				return err
			}
		case <-time.After(time.Millisecond):
			if r := requests.Next(); (c.report.Ops+c.Number)%2 == 0 {
				c.handle(r.HashIDs[:min(len(r.HashIDs), requestMost)])
			} else {
				c.report.Ops++
			}
		}
	}
}

// obey does what the test says, and brings the report up to date.
func (c *traceClient) obey(what string) {
	s := c.Stats()
	c.report.Nodes, c.report.Trouble, c.report.Missing = map[string]cluster.State{}, s.Trouble,
		map[string]int{}
	for _, n := range s.Nodes {
		c.report.Nodes[n.Name] = n.State
	}
	for name := range ledgers {
		for chain := range ledgerChains {
			keys := ledgerOf(chain)
			switch what {
			case "store":
				c.store(name, keys, 0)
			case "check":
				for k, o := range c.load(name, keys) {
					if o != cache.Done {
						c.report.Missing[c.missed(name, keys, k)]++
					}
				}
			}
		}
	}
	if what == "end" {
		ctx, cancel := context.WithTimeout(context.Background(), faultPatience)
		defer cancel()
		c.settled()
		err := c.Cluster.Close(ctx)
		if err = errors.Join(err, c.region.Close(), c.end()); err != nil { // nobody has a lease
			c.fail("end", err)
		}
	}
}

// missed is where a block of a ledger is counted that is not there.
func (c *traceClient) missed(name string, keys []cache.Key, k int) string {
	if name != "single" {
		return name
	}
	_, first := placement.SegmentOf(k)
	return faultNodeName(placement.Owners(nil, c.bids, keys[first], 1)[0])
}

func ledgerOf(chain int) []cache.Key {
	keys := make([]cache.Key, ledgerKeys)
	for k := range keys {
		enc.BigEndian.PutUint64(keys[k][:], 1<<40+uint64(chain))
		enc.BigEndian.PutUint64(keys[k][8:], uint64(k))
	}
	return keys
}

func (c *traceClient) fail(what string, err error) {
	if c.report.Error == "" {
		c.report.Error = what + ": " + err.Error()
	}
}

// op runs an operation within its limit. Without the proof that nothing moves any more the memory
// is detached, and attached anew.
func (c *traceClient) op(what string, do func(ctx context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), clientLimit)
	defer cancel()
	began := time.Now()
	err := do(ctx)
	c.report.Over = max(c.report.Over, time.Since(began)-clientLimit)
	c.report.Ops++
	if errors.Is(err, engine.ErrUnproven) {
		long, cancel := context.WithTimeout(context.Background(), faultPatience)
		defer cancel()
		for err != nil && long.Err() == nil {
			err = c.Detach(long, c.region)
		}
		err = errors.Join(err, c.Attach(long, c.region))
	}
	if err != nil {
		c.fail(what, err)
	}
}

func (c *traceClient) slot(k int) []byte { return c.memory[k*clientBlock:][:clientBlock] }

func (c *traceClient) place(n int) serve.Place {
	p := serve.Place{Region: c.region, Stride: clientBlock, Run: clientBlock}
	for k := range n {
		p.Slots = append(p.Slots, uint32(k))
	}
	return p
}

var restingSlot = bytes.Repeat([]byte{resting}, clientBlock)

// rest is how an operation leaves the memory.
func (c *traceClient) rest() {
	for k := range clientRoom {
		copy(c.slot(k), restingSlot)
	}
}

// settled looks whether a node has changed the memory since.
func (c *traceClient) settled() {
	for k := range clientRoom {
		if !bytes.Equal(c.slot(k), restingSlot) {
			c.report.Landed++
		}
	}
}

// load loads blocks of a chain, and looks at every byte of those that are there.
func (c *traceClient) load(name string, keys []cache.Key) (outcomes []cache.Outcome) {
	c.settled()
	defer c.rest()
	outcomes = make([]cache.Outcome, len(keys))
	c.op("load", func(ctx context.Context) error {
		got, err := c.spaces[name].Load(ctx, keys, c.place(len(keys)))
		copy(outcomes, got)
		return err
	})
	for k, o := range outcomes {
		if o == cache.Done {
			c.look(k, &keys[k])
		}
	}
	return outcomes
}

func (c *traceClient) look(slot int, key *cache.Key) {
	c.report.Hits++
	for at, p := 0, c.slot(slot); at < len(p); at += 8 {
		if enc.LittleEndian.Uint64(p[at:]) != contentWord(key, at) {
			c.report.Wrong++
			return
		}
	}
}

// store stores the blocks of a chain from one on.
func (c *traceClient) store(name string, keys []cache.Key, from int) {
	c.settled()
	defer c.rest()
	for k := range keys[from:] {
		for at, p := 0, c.slot(k); at < len(p); at += 8 {
			enc.LittleEndian.PutUint64(p[at:], contentWord(&keys[from+k], at))
		}
	}
	c.op("store", func(ctx context.Context) error {
		_, err := c.spaces[name].Behind(keys[:from]).Store(ctx, keys[from:],
			c.place(len(keys)-from))
		return err
	})
}

// handle loads what there is of a request's blocks, at times by a token, and stores the others.
func (c *traceClient) handle(ids []uint64) {
	keys := make([]cache.Key, len(ids))
	for k, id := range ids {
		enc.BigEndian.PutUint64(keys[k][:], id)
	}
	found := 0
	var token *cluster.Token
	c.op("match", func(ctx context.Context) (err error) {
		if len(keys)%3 > 0 {
			m, err := c.spaces["trace"].Match(ctx, keys)
			found = m.Prefix
			return err
		}
		token, err = c.spaces["trace"].MatchPinned(ctx, 10*time.Second, keys)
		return err
	})
	switch {
	case token != nil:
		found = token.Prefix
		c.pinned(token, keys[:found])
	case found > 0:
		c.load("trace", keys[:found])
	}
	if found < len(keys) {
		c.store("trace", keys, found)
	}
}

// pinned loads the blocks of a token: all of them, or none counts.
func (c *traceClient) pinned(token *cluster.Token, keys []cache.Key) {
	c.settled()
	defer c.rest()
	c.op("load by a token", func(ctx context.Context) error {
		err := c.spaces["trace"].LoadPinned(ctx, token, 0, keys, c.place(len(keys)))
		switch {
		case err == nil:
			for k := range keys {
				c.look(k, &keys[k])
			}
		case errors.Is(err, cluster.ErrTokenLost) && !errors.Is(err, engine.ErrUnproven):
			return nil
		}
		return err
	})
	_ = token.Close() // a node that is gone has no pin
}

// putNamespace puts what a namespace may have into an etcd.
func putNamespace(ctx context.Context, url, name, value string) error {
	body, err := json.Marshal(map[string]any{"key": []byte("sluice/namespaces/" + name),
		"value": []byte(value)})
	for ctx.Err() == nil {
		var q *http.Request
		q, err = http.NewRequestWithContext(ctx, http.MethodPost, url+"/v3/kv/put",
			bytes.NewReader(body))
		if err != nil {
			return err
		}
		var a *http.Response
		if a, err = http.DefaultClient.Do(q); err == nil {
			if err = a.Body.Close(); a.StatusCode == http.StatusOK {
				return err
			}
			err = errors.New(a.Status)
		}
		time.Sleep(20 * time.Millisecond) // until it answers
	}
	return fmt.Errorf("put namespace %s: %w", name, err)
}
