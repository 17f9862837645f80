// SPDX-License-Identifier: Apache-2.0

// Package etcd is the directory of a cluster in an etcd: nodes are there as long as they live, and
// namespaces as long as an operator wants. It has no entry for a block.
//
// What is there, under a prefix, in JSON:
//
//	PREFIX/nodes/NAME       a directory.Node, with a lease (Config.Lease)
//	PREFIX/namespaces/NAME  a directory.Namespace, which an operator puts there by etcdctl
//
// The way of a View (Directory.follow, one function): read all that is there from one member, then
// watch from that revision on. A watch of a member that is cut off from the others, or stopped, is
// silent and says nothing new, so that each beat asks the same member for what only a majority can
// answer. When that fails the next member is tried. Until one answers the last view stays, and its
// Trouble says why: no node joins and none leaves meanwhile.
//
// The way of a node (Member.keepAlive): take a lease, put the node there under its name, where no
// other one has it, and keep the lease alive. A lease that has run out, as etcd was away for
// longer, is taken anew. A node that was there before etcd did not answer, and is not when it does
// again, stays in the view for the time that it may take to come back: it finds an etcd that was
// made anew, or restored, with no node at first.
//
// It speaks to etcd by HTTP (client.go) and has no dependency.
package etcd

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/identity"
	"github.com/sluicehq/sluice/kv/directory"
)

// Config is what Open needs.
type Config struct {
	Endpoints []string    // of the members: "http://10.0.0.1:2379"
	TLS       *tls.Config // for endpoints of https; nil: the authorities of the host
	// Identity is for endpoints of https that ask for a certificate, in place of TLS: both sides
	// show one, and that of the endpoint must be for its host.
	Identity *identity.Identity
	Prefix   string // of all keys; default "sluice"

	// Lease is how long a node that has died stays in the directory: from 5 s, the default, to an
	// hour. Longer ones suit an etcd, or nodes, that may not answer for seconds.
	Lease time.Duration

	// HangUp has Open return once each member has refused the connection, as suits a command: by
	// default it tries again until its ctx ends.
	HangUp bool
}

func (cfg Config) prefix() string { return strings.Trim(cmp.Or(cfg.Prefix, "sluice"), "/") }

// Check says what Open would refuse.
func (cfg Config) Check() error {
	if err := checkEndpoints(cfg.Endpoints); err != nil {
		return err
	}
	if cfg.Identity != nil && slices.ContainsFunc(cfg.Endpoints,
		func(e string) bool { return strings.HasPrefix(e, "http:") }) {
		return fmt.Errorf("etcd: with an identity all endpoints are of https: %w", engine.ErrBounds)
	}
	if p := cfg.prefix(); p == "" || len(p) > 255 {
		return fmt.Errorf("etcd: prefix %q: want from 1 to 255 bytes: %w", cfg.Prefix,
			engine.ErrBounds)
	}
	if l := cfg.lease(); l < leaseMin || l > leaseMax {
		return fmt.Errorf("etcd: a lease of %v: want from %v to %v: %w", l, leaseMin, leaseMax,
			engine.ErrBounds)
	}
	return nil
}

func (cfg Config) lease() time.Duration { return cmp.Or(cfg.Lease, leaseMin) }

const (
	leaseMin = 5 * time.Second
	leaseMax = time.Hour
	beat     = leaseMin / 3
	pauseMin = 50 * time.Millisecond // before the next member is tried
	pauseMax = 2 * time.Second

	valueMax   = 16 << 10 // bytes of an entry
	entriesMax = directory.NodesMax + directory.NamespacesMax
	refusedMax = 16
)

// Directory is the view of an etcd, and how nodes join it.
type Directory struct {
	c              *client
	nodes, spaces  string // prefixes of keys
	first, last    []byte // the range of all keys
	lease          time.Duration
	stop           context.CancelFunc
	followed, come chan struct{} // closed when follow has ended, and once a view is there

	mu      sync.Mutex // guards what follows
	view    *directory.View
	changed chan struct{}
	found   map[string]entry     // by key
	gone    map[string]time.Time // keys that etcd has forgotten, and when the view does
}

// entry is what a key has: a node, a namespace, or why it is left out. A namespace that is no good,
// or one too many, and lists who may use it, is one that nobody may use.
type entry struct {
	node  directory.Node
	space directory.Namespace
	err   error
}

// nobodys is a namespace that nobody may use.
func nobodys() directory.Namespace {
	return directory.Namespace{Readers: []string{}, Writers: []string{}}
}

// read reads the value of a key.
func (d *Directory) read(key string, value []byte) (e entry) {
	defer func() {
		lower := bytes.ToLower(value) // as JSON takes them
		if e.err != nil && (bytes.Contains(lower, []byte(`"readers"`)) ||
			bytes.Contains(lower, []byte(`"writers"`))) {
			e.space = nobodys()
		}
	}()
	if len(value) > valueMax {
		return entry{err: fmt.Errorf("%d bytes, at most %d", len(value), valueMax)}
	}
	if name, is := strings.CutPrefix(key, d.nodes); is {
		e.err = json.Unmarshal(value, &e.node)
		if e.err == nil && e.node.Name != name {
			e.err = fmt.Errorf("the node in it is %q", e.node.Name)
		}
		e.err = cmp.Or(e.err, e.node.Check())
	} else if strings.HasPrefix(key, d.spaces) {
		e.err = json.Unmarshal(value, &e.space)
		e.err = cmp.Or(e.err, e.space.Check())
	}
	return e
}

// Open reads the directory, and follows it until Close. It waits until ctx ends for an etcd that
// does not answer.
func Open(ctx context.Context, cfg Config) (*Directory, error) {
	if err := cfg.Check(); err != nil {
		return nil, err
	}
	prefix := cfg.prefix()
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.TLSClientConfig, t.MaxResponseHeaderBytes = cfg.TLS, 64<<10
	t.Proxy = nil // it would be asked for who is in the same cluster
	if cfg.Identity != nil {
		id := cfg.Identity.CheckHost()
		t.DialTLSContext = func(ctx context.Context, network, address string) (net.Conn, error) {
			ctx, cancel := context.WithTimeout(ctx, callLimit) // it outlives the call it is for
			defer cancel()
			plain, err := (&net.Dialer{}).DialContext(ctx, network, address)
			if err != nil {
				return nil, err
			}
			host, _, _ := net.SplitHostPort(address) // it was dialled
			secure, err := id.Call(ctx, plain, host)
			if err != nil {
				return nil, errors.Join(err, plain.Close())
			}
			return secure, nil
		}
	}
	life, stop := context.WithCancel(context.Background())
	d := &Directory{c: &client{endpoints: slices.Clone(cfg.Endpoints),
		http: &http.Client{Transport: t}},
		nodes: prefix + "/nodes/", spaces: prefix + "/namespaces/",
		first: []byte(prefix + "/"), last: []byte(prefix + "0"), // which is behind the slash
		lease: cfg.lease(),
		stop:  stop, followed: make(chan struct{}), come: make(chan struct{}),
		view: &directory.View{}, changed: make(chan struct{}), gone: map[string]time.Time{}}
	go d.run(life, cfg.HangUp)
	why := errors.New("each member refuses the connection")
	select {
	case <-d.come:
		return d, nil
	case <-d.followed:
	case <-ctx.Done():
		why = context.Cause(ctx)
	}
	v, _ := d.View()
	d.Close()
	return nil, fmt.Errorf("the directory does not answer: %w: %w", why,
		cmp.Or(v.Trouble, errors.New("no member of etcd has been asked in that time")))
}

// Close ends the following. Leave first: a Member does not end by it.
func (d *Directory) Close() {
	d.stop()
	<-d.followed
	d.c.http.CloseIdleConnections()
}

// View implements directory.Directory.
func (d *Directory) View() (*directory.View, <-chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.view, d.changed
}

// run follows one member after the other, with hangUp until all have refused the connection.
func (d *Directory) run(ctx context.Context, hangUp bool) {
	defer close(d.followed)
	pause, refused := pauseMin, 0
	for turn := 0; ; turn++ {
		began := time.Now()
		err := d.follow(ctx, d.c.endpoints[turn%len(d.c.endpoints)])
		if ctx.Err() != nil {
			return
		}
		d.mu.Lock()
		d.show(err)
		hangUp = hangUp && d.found == nil // there is no view yet
		d.mu.Unlock()
		if refused++; !errors.Is(err, syscall.ECONNREFUSED) {
			refused = 0
		}
		if hangUp && refused == len(d.c.endpoints) {
			return
		}
		if time.Since(began) > pauseMax {
			pause = pauseMin
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		if (turn+1)%len(d.c.endpoints) == 0 {
			pause = min(2*pause, pauseMax)
		}
	}
}

// follow is the story of a view from one member. It returns why it has ended.
func (d *Directory) follow(ctx context.Context, endpoint string) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	// All that is there, by a majority, and the revision of it.
	all, err := ask[rangeAnswer](ctx, d.c, endpoint, "kv/range",
		rangeRequest{Key: d.first, RangeEnd: d.last, Limit: entriesMax})
	if err != nil {
		return err
	}
	if all.More || len(all.List) > entriesMax {
		return d.tooMany()
	}

	// From now on, at each beat, what a member alone cannot answer. It is also when a node goes
	// that etcd has forgotten.
	var beats sync.WaitGroup
	defer beats.Wait()
	defer cancel(nil)
	beats.Go(func() {
		ticks := time.NewTicker(beat)
		defer ticks.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticks.C:
			}
			_, err := ask[rangeAnswer](ctx, d.c, endpoint, "kv/range",
				rangeRequest{Key: d.first, CountOnly: true})
			if err != nil {
				cancel(err)
				return
			}
			d.forget()
		}
	})

	// What changes, from there on. Its first message says that it has begun.
	begun := time.AfterFunc(callLimit, func() {
		cancel(fmt.Errorf("%s has not begun a watch within %v", endpoint, callLimit))
	})
	defer begun.Stop()
	body, err := d.c.post(ctx, endpoint, "watch", map[string]any{"create_request": map[string]any{
		"key": d.first, "range_end": d.last, "start_revision": all.Header.Revision + 1}})
	if err != nil {
		return cmp.Or(context.Cause(ctx), err)
	}
	defer body.Close()
	d.replace(all.List)
	bounded := &counted{from: body}
	for messages := json.NewDecoder(bounded); ; {
		bounded.left = answerMax
		var m stream[watchAnswer]
		err := messages.Decode(&m)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, io.EOF):
			return fmt.Errorf("etcd at %s has ended the watch", endpoint)
		case err != nil:
			return fmt.Errorf("watch etcd at %s: %w", endpoint, err)
		case m.Error != nil:
			return fmt.Errorf("watch etcd at %s: %.1024s", endpoint, *m.Error)
		case m.Result.Canceled:
			return fmt.Errorf("etcd at %s has ended the watch: %.1024s", endpoint, m.Result.Reason)
		}
		begun.Stop()
		if !d.apply(m.Result.Events) {
			return d.tooMany()
		}
	}
}

func (d *Directory) tooMany() error {
	return fmt.Errorf("etcd has more than %d entries under %s: %w", entriesMax, d.first,
		engine.ErrBounds)
}

// replace takes all that is there. A node that is not, and was before etcd did not answer, stays
// for a while.
func (d *Directory) replace(all []keyValue) {
	d.mu.Lock()
	defer d.mu.Unlock()
	found := map[string]entry{}
	for _, e := range all {
		key := string(e.Key)
		found[key] = d.read(key, e.Value)
		delete(d.gone, key)
	}
	now := time.Now()
	for key, e := range d.found {
		if _, is := found[key]; is || !strings.HasPrefix(key, d.nodes) {
			continue
		}
		until, is := d.gone[key]
		switch {
		case !is:
			d.gone[key] = now.Add(2 * d.lease) // until then it may have joined again
		case now.After(until): // before a beat came
			delete(d.gone, key)
			continue
		}
		found[key] = e
	}
	d.found = found
	d.show(nil)
	select {
	case <-d.come:
	default:
		close(d.come)
	}
}

// forget drops the nodes that have not come back.
func (d *Directory) forget() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for key, until := range d.gone {
		if time.Now().After(until) {
			delete(d.gone, key)
			delete(d.found, key)
			d.show(nil)
		}
	}
}

// apply takes what has changed, unless there were more entries then than may be.
func (d *Directory) apply(events []event) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(events) == 0 {
		return true
	}
	found := maps.Clone(d.found)
	for _, e := range events {
		key := string(e.Of.Key)
		if e.Type == "DELETE" {
			delete(found, key)
		} else {
			found[key] = d.read(key, e.Of.Value)
		}
	}
	if len(found) > entriesMax+len(d.gone) {
		return false
	}
	for _, e := range events {
		delete(d.gone, string(e.Of.Key))
	}
	d.found = found
	d.show(nil)
	return true
}

// show makes the view anew of what was found. Entries that are no good are left out, and so are
// those that are too many. The caller holds the lock.
func (d *Directory) show(trouble error) {
	v := &directory.View{Namespaces: map[string]directory.Namespace{}, Trouble: trouble}
	refuse := func(key string, err error) {
		if len(v.Refused) < refusedMax {
			v.Refused = append(v.Refused, fmt.Sprintf("%.256s: %v", key, err))
		}
	}
	for _, key := range slices.Sorted(maps.Keys(d.found)) {
		e := d.found[key]
		space, isSpace := strings.CutPrefix(key, d.spaces)
		switch {
		case e.err != nil:
			refuse(key, e.err)
			if isSpace && e.space.Readers != nil {
				v.Namespaces[space] = e.space
			}
		case strings.HasPrefix(key, d.nodes):
			if len(v.Nodes) == directory.NodesMax {
				refuse(key, fmt.Errorf("there are %d nodes before it", len(v.Nodes)))
				continue
			}
			v.Nodes = append(v.Nodes, e.node)
		case isSpace:
			if len(v.Namespaces) >= directory.NamespacesMax {
				refuse(key, fmt.Errorf("there are %d namespaces before it", len(v.Namespaces)))
				if e.space.Readers != nil || e.space.Writers != nil {
					v.Namespaces[space] = nobodys()
				}
				continue
			}
			v.Namespaces[space] = e.space
		}
	}
	d.view = v
	close(d.changed)
	d.changed = make(chan struct{})
}
