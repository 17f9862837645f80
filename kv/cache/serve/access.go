// SPDX-License-Identifier: Apache-2.0

package serve

import (
	"crypto/hmac"
	"crypto/sha256"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/sluicehq/sluice/engine"
)

// Access says who may use the namespaces of a name, of all whom the engine serves.
type Access struct {
	// Readers and Writers list names of certificates, their common name or a DNS name of theirs,
	// and Local. Nil: everybody; a list without a name: nobody. A reader may ask what is there, and
	// load it; a writer may store, remove and hint, and learns by that which keys are there.
	Readers, Writers []string

	// Salt is a secret of this server. With one the files of the cache know the namespace by a
	// digest that nobody can make without it. Nil: by cache.DigestOf of what the client says.
	Salt []byte
}

// Local stands in a list of Access for the processes that come over the server's Unix socket: they
// are of its user.
const Local = "local"

// rights are what a client may do with a namespace.
type rights uint8

const (
	mayRead rights = 1 << iota
	mayWrite
	mayAll = mayRead | mayWrite
)

// rightsFor returns what a request about a namespace takes.
func rightsFor(what kind) rights {
	switch what {
	case kindLeave:
		return 0
	case kindMatch, kindLoad, kindPrefetch, kindPin, kindEstimate, kindBlocks, kindBlock:
		return mayRead
	case kindStore, kindReplace, kindRemove, kindHint, kindEnvelope:
		return mayWrite
	}
	return mayAll
}

// names are those by which a list of Access knows a client. One that it knows by none is in no
// list.
func (c *client) names() (list []string) {
	if OverUnixSocket(c.peer) {
		return []string{Local}
	}
	if shown := c.peer.Certificate(); shown != nil {
		list = append(list, shown.Subject.CommonName)
		list = append(list, shown.DNSNames...)
	}
	list = slices.DeleteFunc(list, func(name string) bool { return name == "" || name == Local })
	return slices.Compact(list) // the first DNS name is often the common name
}

func (a *Access) rightsOf(c *client) (has rights) {
	names := c.names()
	for _, of := range []struct {
		list  []string
		right rights
	}{{a.Readers, mayRead}, {a.Writers, mayWrite}} {
		if of.list == nil || slices.ContainsFunc(names,
			func(name string) bool { return slices.Contains(of.list, name) }) {
			has |= of.right
		}
	}
	return has
}

// mayOpen returns the geometry by which the cache knows a namespace that a client opens by its own,
// or why the client may not: it may neither read nor write it.
func (s *Server) mayOpen(c *client, what kind, name string, geometry [32]byte) ([32]byte, error) {
	if s.cfg.Access == nil {
		return geometry, nil
	}
	a := s.cfg.Access(name)
	if a.rightsOf(c) == 0 {
		return geometry, s.refuse(c, what, name, "neither its readers nor its writers name")
	}
	if a.Salt == nil {
		return geometry, nil
	}
	mac := hmac.New(sha256.New, a.Salt)
	mac.Write(geometry[:])
	return [32]byte(mac.Sum(nil)), nil
}

// mayDo says why a client may not make a request about a namespace that it has open; nil: it may.
// What is known of that holds until the next Reassign.
func (s *Server) mayDo(c *client, what kind, n *space) error {
	if s.cfg.Access == nil {
		return nil
	}
	turn := s.turn.Load()
	s.mu.Lock()
	has, known := n.has, n.turn == turn
	s.mu.Unlock()
	if !known {
		a := s.cfg.Access(n.Name())
		has = a.rightsOf(c)
		s.mu.Lock()
		n.has, n.turn = has, turn
		s.mu.Unlock()
	}
	switch lacks := rightsFor(what) &^ has; {
	case lacks == 0:
		return nil
	case lacks&mayRead != 0:
		return s.refuse(c, what, n.Name(), "its readers do not name")
	}
	return s.refuse(c, what, n.Name(), "its writers do not name")
}

// nameShown is how much of the name of a namespace a refusal shows, in bytes.
const nameShown = 256

// refuse is the error of a request that a client may not make. It says nothing of what is there.
// The log is told of it.
func (s *Server) refuse(c *client, what kind, name, why string) error {
	who := "a client without a certificate, or a name in it"
	if names := c.names(); len(names) > 0 {
		who = fmt.Sprintf("%q", names)
	}
	name = name[:min(len(name), nameShown)] // it may be as long as a message
	s.refused.Add(1)
	if s.cfg.Log != nil && s.logging.TryLock() { // a log that takes nothing holds one request up
		if s.telling.Allow() {
			s.cfg.Log.Warn("refused", "request", what.String(), "namespace", name, "who", who,
				"from", c.peer.Origin(), "engine", c.peer.Name(), "refusals", s.refused.Swap(0))
		}
		s.logging.Unlock()
	}
	return fmt.Errorf("%v, namespace %q: %s %s: add a name of it there, or use a certificate that "+
		"they name: %w", what, name, why, who, os.ErrPermission)
}

// mayInspect says why a client may not ask what all others have in the cache; nil: it may.
func (s *Server) mayInspect(c *client, what kind) error {
	if s.cfg.Inspect(c.peer) {
		return nil
	}
	_ = s.refuse(c, what, "", "")
	return fmt.Errorf("what others have in the cache is told to those alone who come by "+
		"its Unix socket: %w", os.ErrPermission)
}

var kindNames = map[kind]string{kindSpace: "open", kindMatch: "match", kindLoad: "load",
	kindStore: "store", kindReplace: "replace", kindPrefetch: "prefetch", kindRemove: "remove",
	kindHint: "hint", kindEnvelope: "hints", kindEstimate: "estimate", kindPin: "pin",
	kindReport: "report", kindSpaces: "list namespaces", kindFind: "find",
	kindBlocks: "list blocks", kindBlock: "block"}

// String returns the name of a request.
func (k kind) String() string {
	if name := kindNames[k]; name != "" {
		return name
	}
	return fmt.Sprintf("request %d", uint8(k))
}

// OverUnixSocket reports whether a peer came over a Unix socket: it is of the server's user then.
func OverUnixSocket(p *engine.Peer) bool {
	from := p.Origin() // "": it has not dialled, or its exchange has not ended
	return from != "" && !strings.Contains(from, ":")
}
