// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/serve"
)

// Token is one answer for several processes, such as the ranks of a model: how long a prefix all of
// their chains have, at which nodes the blocks are, and pins that keep them there. One process has
// it of MatchPinned and hands Bytes to the others; each calls LoadPinned, which loads all blocks of
// its chain, or says that none counts.
//
// Eviction, a TTL, and a list of nodes that one rank has and another has not cannot make them
// differ. The death of a node can, between the Load of one rank and that of another: a rank whose
// LoadPinned fails must have the others miss, too, as a group does by any reduction.
type Token struct {
	Prefix int // blocks of each chain
	chains [][]run
	pins   []*serve.Pin // of the process that has made it
}

// run is some blocks of a chain, one behind the other, at a node.
type run struct {
	Node   string `json:"node"`
	Blocks int    `json:"blocks"`
}

// tokenText is a token in JSON.
type tokenText struct {
	Prefix int     `json:"prefix"`
	Chains [][]run `json:"chains"`
}

const (
	tokenMax  = 4 << 20 // bytes
	chainsMax = 1024    // of a token
)

// ErrTokenLost is the error of LoadPinned where not all blocks of the token were loaded: none
// counts. Its text says why.
var ErrTokenLost = errors.New("the blocks of the token are not there as a whole")

// MatchPinned looks for the longest prefix that all chains have, and pins it for ttl, from a second
// to an hour: blocks on disks it has read into memory. Ranks that have the same keys are one chain.
// What the nodes' budgets (cache.NamespaceOptions.HoldMax) refuse to pin is not found. Close the
// token when all ranks have loaded.
func (s *Space) MatchPinned(ctx context.Context, ttl time.Duration, chains ...[]cache.Key) (*Token,
	error) {
	if len(chains) == 0 || len(chains) > chainsMax || ttl < time.Second || ttl > time.Hour {
		return nil, fmt.Errorf("match %d chains for %v: want from 1 to %d, and from a "+
			"second to an hour: %w", len(chains), ttl, chainsMax, engine.ErrBounds)
	}
	l := s.c.limit(ctx)
	defer l.free()

	// The prefix that all have, and where.
	at := make([][]*node, len(chains))
	t := &Token{Prefix: len(chains[0])}
	for i, keys := range chains {
		m, nodes, err := s.find(l.nodes, keys)
		if err != nil {
			return nil, err
		}
		at[i], t.Prefix = nodes, min(t.Prefix, m.Prefix)
	}

	// Pin it: each node all that it has of a chain. The prefix ends before what none has any more.
	var mu sync.Mutex
	var pinning sync.WaitGroup
	found := t.Prefix
	for i, keys := range chains {
		parts := map[*node]*part{}
		for k, n := range at[i][:found] {
			if parts[n] == nil {
				parts[n] = &part{n: n}
			}
			parts[n].at = append(parts[n].at, k)
			parts[n].keys = append(parts[n].keys, keys[k])
		}
		for n, p := range parts {
			pinning.Go(func() {
				var pin *serve.Pin
				outcomes := make([]cache.Outcome, len(p.keys)) // Undone
				_, err := s.ask(l, n, func(_ *conn, space *serve.Space) (err error) {
					pin, err = space.Pin(l.nodes, p.keys, ttl)
					return err
				})
				mu.Lock()
				defer mu.Unlock()
				if err == nil {
					t.pins = append(t.pins, pin)
					outcomes = pin.Outcomes()
				}
				for k, o := range outcomes {
					if o != cache.Done {
						t.Prefix = min(t.Prefix, p.at[k])
					}
				}
			})
		}
	}
	pinning.Wait()
	for i := range chains {
		var runs []run
		for _, n := range at[i][:t.Prefix] {
			if len(runs) == 0 || runs[len(runs)-1].Node != n.name {
				runs = append(runs, run{Node: n.name})
			}
			runs[len(runs)-1].Blocks++
		}
		t.chains = append(t.chains, runs)
	}
	if n := len(t.Bytes()); n > tokenMax {
		_ = t.Close()
		return nil, fmt.Errorf("a token of %d bytes, at most %d: match fewer chains, or shorter "+
			"ones: %w", n, tokenMax, engine.ErrBounds)
	}
	return t, nil
}

// Close ends the pins, in the process that has made the token. It waits at most a second for the
// nodes.
func (t *Token) Close() error {
	errs := make([]error, len(t.pins))
	var closing sync.WaitGroup
	for k, p := range t.pins {
		closing.Go(func() { errs[k] = p.Close() })
	}
	closing.Wait()
	return errors.Join(errs...)
}

// Bytes is the token for other processes.
func (t *Token) Bytes() []byte {
	text, _ := json.Marshal(tokenText{t.Prefix, t.chains}) // numbers and names
	return text
}

// ParseToken reads what Bytes has returned.
func ParseToken(text []byte) (*Token, error) {
	var in tokenText
	err := error(nil)
	if len(text) > tokenMax {
		err = fmt.Errorf("%d bytes, at most %d", len(text), tokenMax)
	} else {
		err = json.Unmarshal(text, &in)
	}
	if err == nil && (in.Prefix < 0 || in.Prefix > keysMax || len(in.Chains) == 0 ||
		len(in.Chains) > chainsMax) {
		err = fmt.Errorf("%d chains of %d blocks", len(in.Chains), in.Prefix)
	}
	for i, runs := range in.Chains {
		left := in.Prefix
		for _, r := range runs {
			if err == nil && (r.Blocks <= 0 || r.Blocks > left) {
				err = fmt.Errorf("chain %d has other blocks than %d", i, in.Prefix)
			}
			left -= r.Blocks
		}
		if err == nil && left != 0 {
			err = fmt.Errorf("chain %d has other blocks than %d", i, in.Prefix)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("token: %w: %w", err, engine.ErrCorrupt)
	}
	return &Token{Prefix: in.Prefix, chains: in.Chains}, nil
}

// LoadPinned loads the blocks of one chain of a token: keys are its first Prefix ones. It returns
// nil where all are Done. ErrTokenLost says that they are not: what lies in the slots is undefined
// then, and no node writes there any more, unless the error is engine.ErrUnproven, too.
func (s *Space) LoadPinned(ctx context.Context, t *Token, chain int, keys []cache.Key,
	to serve.Place) error {
	reg, err := s.check(keys, &to, true)
	if err == nil && (chain < 0 || chain >= len(t.chains) || len(keys) != t.Prefix) {
		err = fmt.Errorf("chain %d with %d keys, of a token of %d chains of %d: %w", chain,
			len(keys), len(t.chains), t.Prefix, engine.ErrBounds)
	}
	if err != nil {
		return fmt.Errorf("load: %w", err)
	}
	l := s.c.limit(ctx)
	defer l.free()
	w := s.way(s.c.layout.Load(), keys) // for the segments alone
	defer w.free()
	parts := map[string]*part{}
	var list []*part
	k, run := 0, 0
	for _, r := range t.chains[chain] {
		p := parts[r.Node]
		if p == nil {
			s.c.mu.Lock()
			n := s.c.nodes[r.Node]
			s.c.mu.Unlock()
			if n == nil {
				return fmt.Errorf("load: the directory has no node %q: %w", r.Node, ErrTokenLost)
			}
			p = &part{n: n}
			parts[r.Node], list = p, append(list, p)
		}
		for range r.Blocks {
			for w.runs[run].to <= k {
				run++
			}
			p.add(k, keys[k], &w.runs[run])
			k++
		}
	}
	var lost error
	err = s.moveAll(l, list, reg, &to, (*serve.Space).Load, func(k int, o cache.Outcome) {
		if o != cache.Done && lost == nil {
			lost = fmt.Errorf("block %d is %v: %w", k, o, ErrTokenLost)
		}
	})
	if err = errors.Join(lost, err); err != nil {
		return fmt.Errorf("load: %w", err)
	}
	return nil
}
