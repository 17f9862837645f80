// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/sluicehq/sluice/csrc/verbs"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// inbound is our end of a connection that a peer began: over it the peer reaches our
// memory and sends messages. One goroutine serves it from hello to end.
type inbound struct {
	b       *Backend
	ch      *channel
	visit   *session.Visit // until the hello is answered
	link    link
	rails   []int        // of ours, by queue pair
	counted bool         // one of Config.ConnsMax, until nothing of it is left
	hold    session.Gate // held by every use of link by others than run

	knowing sync.Mutex           // taken last, for a few fields
	knows   map[*memory]struct{} // whose keys of now the peer was told
	told    bool                 // the peer was told a key

	mu        sync.Mutex
	questions []*importRequest // not answered yet
	importing bool             // a goroutine answers them
	asked     sync.WaitGroup   // that one
	quitting  bool             // we close: the program is told nothing
	replies   replies
}

// questionsMax bounds the imports that a peer has us remember.
const questionsMax = 4096

// run serves the peer until it parts, dies, or we close.
func (c *inbound) run() {
	parted, had := false, true
	for !parted {
		m, err := c.ch.receive()
		if err != nil {
			break
		}
		switch m := m.(type) {
		case *importRequest:
			c.question(m)
		case *pairRequest:
			c.remake(m)
		case *answersTaken:
			if !c.credited(m.count) {
				c.ch.close(driver.ErrCorrupt)
			}
		case *bye:
			parted, had = true, !m.abandoned
		default:
			c.ch.close(driver.ErrCorrupt)
		}
	}
	c.retire(parted, had)
}

// retire ends our end. The messages that came are in their ring before the last word is
// said, and what parted politely learns that our queue pairs are gone.
func (c *inbound) retire(parted, had bool) {
	c.endReplies()
	c.hold.Shut()
	c.hold.Wait()
	ended := c.link.End(verbs.Lost, false) == nil // a queue pair that does not drain is destroyed
	c.mu.Lock()
	quitting := c.quitting
	c.mu.Unlock()
	switch {
	case !ended:
		c.ch.close(driver.ErrUnproven) // no word that the peer could take for a proof
	case parted:
		c.ch.send(farewell{}.encode())
		c.ch.farewell(c.b.cfg.Grace)
	case quitting:
		c.ch.send(quit{}.encode())
		c.ch.farewell(c.b.cfg.Grace)
	default:
		c.ch.close(driver.ErrPeerLost)
	}
	c.asked.Wait()
	c.knowing.Lock()
	known := slices.Collect(maps.Keys(c.knows))
	c.knowing.Unlock()
	for _, m := range known {
		m.forget(c)
	}
	if c.link.Close() != nil {
		c.b.keep(c.link)
	}
	if had && !quitting {
		c.b.words.Add(c)
		c.b.wake()
	} else {
		c.b.remove(c.link.ID())
	}
}

// question has an import answered beside: NICs may take long to learn of large memory,
// and queue pairs must not wait for that.
func (c *inbound) question(q *importRequest) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.questions) >= questionsMax {
		go c.ch.close(driver.ErrFull)
		return
	}
	c.questions = append(c.questions, q)
	if !c.importing {
		c.importing = true
		c.asked.Go(c.answer)
	}
}

// answer answers imports until there are none.
func (c *inbound) answer() {
	for {
		c.mu.Lock()
		if len(c.questions) == 0 {
			c.importing = false
			c.mu.Unlock()
			return
		}
		q := c.questions[0]
		c.questions = c.questions[1:]
		c.mu.Unlock()
		if m := c.b.table.At(q.key); m != nil {
			m.answer(c, q)
		} else {
			c.ch.send((&importAnswer{id: q.id, status: session.StatusRevoked}).encode())
		}
	}
}

// keysOf has the keys of the NICs in the order of the pairs.
func (c *inbound) keysOf(granted []uint32) []uint32 {
	list := make([]uint32, len(c.rails))
	for pair, rail := range c.rails {
		list[pair] = granted[rail]
	}
	return list
}

// remake ends our end of a queue pair that has failed at the peer's, and makes a new one. Only
// when ours is gone can nothing of the first try land any more; without that there is no
// answer, and the connection ends.
func (c *inbound) remake(q *pairRequest) {
	pair := int(q.pair)
	if pair >= len(c.rails) || c.link.PairEnd(pair) != nil {
		c.ch.close(driver.ErrCorrupt)
		return
	}
	a := pairReply{pair: q.pair, attempt: q.attempt, seen: c.link.Seen()}
	if q.there {
		a.pairAnswer = c.make(pair, &q.end)
	}
	c.ch.send(a.encode())
}

// news implements end: where ours has failed, the peer learns of it at once.
func (c *inbound) news(n verbs.News) {
	if n.Kind == verbs.PairFailed && n.Pair >= 0 && n.Pair < verbs.PairsMax {
		c.ch.send((&broken{pair: uint8(n.Pair)}).encode())
	}
}

// breakPairs ends all our queue pairs of the connection: the strong means of Revoke. The
// peer has them made anew. An error: one of them may be there.
func (c *inbound) breakPairs() error {
	if !c.hold.Enter() {
		return fmt.Errorf("a connection is ending: %w", driver.ErrBusy)
	}
	defer c.hold.Exit()
	var errs []error
	for pair := range c.rails {
		err := c.link.PairEnd(pair)
		if err == nil {
			c.ch.send((&broken{pair: uint8(pair)}).encode())
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// leave has the connection end because we close.
func (c *inbound) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.quitting = true
	_ = c.ch.conn.SetReadDeadline(aLongTimeAgo) // run ends by it, and can still say so
}
