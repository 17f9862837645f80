// SPDX-License-Identifier: Apache-2.0

// Package directory says which nodes a cluster of caches has, and what its namespaces may have. It
// says nothing of a block: where one lies follows from its key and the nodes (kv/cluster).
//
// A Directory is a list that does not change (List), or one of etcd (kv/directory/etcd), which
// nodes join and leave.
package directory

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/sluicehq/sluice/engine"
)

// The bounds of a directory.
const (
	NodesMax      = 1024 // nodes
	NamespacesMax = 1024 // namespaces
	CopiesMax     = 8    // of a block
	nameMax       = 255  // bytes of a name
	addressesMax  = 8    // of a node
	addressMax    = 512  // bytes of one
	usersMax      = 64   // readers, and writers, of a namespace
)

// Directory is where the nodes of a cluster are known. Its methods may be called by any goroutine.
type Directory interface {
	// View returns what is known now, and a channel that is closed when something else is. It does
	// not wait. A View does not change.
	View() (*View, <-chan struct{})
}

// View is what a directory knew at a moment.
type View struct {
	Nodes      []Node               // by name
	Namespaces map[string]Namespace // by name
	// Trouble is why later changes may not be in the view: the directory does not answer. Nil: it
	// does.
	Trouble error
	// Refused says which entries of the directory are left out, and why, at most a few.
	Refused []string
}

// Node is a process that serves a cache. Programs read the names in JSON.
type Node struct {
	// Name is the name of its engine. No two nodes of a cluster have one name. A node keeps its
	// name as long as its blocks: the name decides which blocks belong to it.
	Name string `json:"name"`
	// Addresses are where it serves, in the order in which they are tried: "unix:PATH", for
	// processes of its host, or "tcp:HOST:PORT".
	Addresses []string `json:"addresses"`
	// Certificate is the name for which its certificate must be; "": see identity.CheckHost.
	Certificate string `json:"certificate,omitempty"`
	// Weight is its share of the blocks, relative to others. 0: it gets none, as one that drains.
	Weight uint32 `json:"weight"`
	// Generation tells a process from that which had the name before: it is larger.
	Generation int64 `json:"generation,omitempty"`
	Load       Load  `json:"load"`
}

// Load is how busy a node was lately.
type Load struct {
	Running int `json:"running"` // requests, rounded up to a power of two
	Memory  int `json:"memory"`  // of its memory that has blocks, in percent, by steps of 5
}

// Namespace is what a namespace may have on each node; see cache.NamespaceOptions.
type Namespace struct {
	Copies      int    `json:"copies,omitempty"` // of each block, on as many nodes; 0: one
	Priority    int    `json:"priority,omitempty"`
	MemoryQuota uint64 `json:"memory_quota,omitempty"` // bytes, on each node
	DiskQuota   uint64 `json:"disk_quota,omitempty"`   // bytes, on each node
	TTLSeconds  uint32 `json:"ttl_seconds,omitempty"`
	// Readers and Writers are who may use it, see serve.Access: nil: everybody; empty: nobody.
	Readers []string `json:"readers,omitempty"`
	Writers []string `json:"writers,omitempty"`
}

// TTL returns TTLSeconds.
func (n Namespace) TTL() time.Duration { return time.Duration(n.TTLSeconds) * time.Second }

// Check says what is wrong with a node.
func (n *Node) Check() error {
	if err := checkName(n.Name); err != nil {
		return fmt.Errorf("node: %w", err)
	}
	if strings.ContainsAny(n.Name, "/,=") {
		return fmt.Errorf("node %q: a name has none of / , and =: %w", n.Name, engine.ErrBounds)
	}
	if len(n.Addresses) == 0 || len(n.Addresses) > addressesMax || len(n.Certificate) > nameMax {
		return fmt.Errorf("node %q has %d addresses, want from 1 to %d: %w", n.Name,
			len(n.Addresses), addressesMax, engine.ErrBounds)
	}
	for _, a := range n.Addresses {
		if _, _, err := SplitAddress(a); err != nil {
			return fmt.Errorf("node %q: %w", n.Name, err)
		}
	}
	return nil
}

// Check says what is wrong with a namespace.
func (n Namespace) Check() error {
	if n.Copies < 0 || n.Copies > CopiesMax || n.Priority < 0 || n.Priority > 7 {
		return fmt.Errorf("%d copies, priority %d: want up to %d copies, and a priority from 0 to "+
			"7: %w", n.Copies, n.Priority, CopiesMax, engine.ErrBounds)
	}
	return errors.Join(CheckUsers("readers", n.Readers), CheckUsers("writers", n.Writers))
}

// CheckUsers says what is wrong with a list of who may use a namespace.
func CheckUsers(which string, list []string) error {
	if len(list) > usersMax {
		return fmt.Errorf("%d %s: want at most %d: %w", len(list), which, usersMax,
			engine.ErrBounds)
	}
	for _, name := range list {
		if err := checkName(name); err != nil {
			return fmt.Errorf("%s: %w", which, err)
		}
	}
	return nil
}

func checkName(name string) error {
	if name == "" || len(name) > nameMax || !utf8.ValidString(name) {
		return fmt.Errorf("name %q: want from 1 to %d bytes in UTF-8: %w", name, nameMax,
			engine.ErrBounds)
	}
	return nil
}

// SplitAddress returns the network and the address that engine.Engine.Dial takes.
func SplitAddress(text string) (network, address string, err error) {
	network, address, _ = strings.Cut(text, ":")
	good := len(text) <= addressMax
	switch network {
	case "unix":
		good = good && strings.HasPrefix(address, "/")
	case "tcp":
		host, port, err := net.SplitHostPort(address)
		good = good && err == nil && host != "" && port != "" && port != "0"
	default:
		good = false
	}
	if !good {
		return "", "", fmt.Errorf("address %q: want unix:/PATH or tcp:HOST:PORT: %w", text,
			engine.ErrBounds)
	}
	return network, address, nil
}

// NewView makes a view of nodes and namespaces, or says what is wrong with them.
func NewView(nodes []Node, namespaces map[string]Namespace) (*View, error) {
	if len(nodes) > NodesMax || len(namespaces) > NamespacesMax {
		return nil, fmt.Errorf("%d nodes and %d namespaces, at most %d and %d: %w", len(nodes),
			len(namespaces), NodesMax, NamespacesMax, engine.ErrBounds)
	}
	v := &View{Nodes: slices.Clone(nodes), Namespaces: namespaces}
	slices.SortFunc(v.Nodes, func(a, b Node) int { return strings.Compare(a.Name, b.Name) })
	for k := range v.Nodes {
		if err := v.Nodes[k].Check(); err != nil {
			return nil, err
		}
		if k > 0 && v.Nodes[k].Name == v.Nodes[k-1].Name {
			return nil, fmt.Errorf("node %q is there twice: %w", v.Nodes[k].Name, engine.ErrBounds)
		}
	}
	for name, n := range namespaces {
		if err := errors.Join(checkName(name), n.Check()); err != nil {
			return nil, fmt.Errorf("namespace: %w", err)
		}
	}
	return v, nil
}

// list is a Directory that does not change.
type list struct{ view *View }

// List makes a directory of nodes and namespaces that stay as they are.
func List(nodes []Node, namespaces map[string]Namespace) (Directory, error) {
	v, err := NewView(nodes, namespaces)
	if err != nil {
		return nil, fmt.Errorf("directory: %w", err)
	}
	return list{v}, nil
}

// View implements Directory.
func (l list) View() (*View, <-chan struct{}) { return l.view, nil }

// ParseList reads nodes of weight 1 from "NAME=ADDRESS,NAME=ADDRESS…".
func ParseList(text string) (nodes []Node, err error) {
	for word := range strings.SplitSeq(text, ",") {
		name, address, _ := strings.Cut(word, "=")
		n := Node{Name: name, Addresses: []string{address}, Weight: 1}
		if err := n.Check(); err != nil {
			return nil, fmt.Errorf("nodes %q: want NAME=ADDRESS,NAME=ADDRESS: %w", text, err)
		}
		nodes = append(nodes, n)
	}
	return nodes, nil
}
