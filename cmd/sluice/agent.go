// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/hostmem"
)

func newAgent() *cobra.Command {
	a := agent{}
	var regions []string
	c := &cobra.Command{
		Use:   "agent",
		Short: "Serve memory and files to peers",
		Long: `Serve regions to peers until it is interrupted: memory of a size, which begins as zeros,
and files or parts of them, read-only unless :rw follows. With :rw=PEER,PEER behind a region those
peers alone may write to it, by the names in their certificates. A peer needs a certificate of the
authority; without one it learns nothing. sluice ls, get and put are such peers, and so is any
engine that dials. Peers that come, go or are refused are logged on standard error.`,
		Example: `  sluice agent --listen 10.0.0.2:7000 --cert a.pem --key a-key.pem --ca ca.pem --region kv=1GiB --region weights=/data/model.bin
  sluice agent --listen 127.0.0.1:7000 --plaintext --region scratch=64MiB
  sluice ls --peer 10.0.0.2:7000 --cert b.pem --key b-key.pem --ca ca.pem`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := a.check(regions); err != nil {
				return err
			}
			a.sentence = func(err error) string { return sentence(c, err) }
			return a.run(c.Context(), c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	s := c.Flags()
	s.StringVar(&a.listen, "listen", "", "HOST:PORT where peers introduce themselves; port 0: "+
		"any that is free")
	s.StringVar(&a.data, "data", "", "HOST:PORT or HOST:PORT-PORT of backend tcp for their "+
		"bytes; without it any free port of the host in --listen")
	s.StringArrayVar(&regions, "region", nil, "NAME=SIZE, NAME=FILE or NAME=FILE:OFFSET:LENGTH, "+
		"with :rw behind a file that peers may write, or :rw=PEER,PEER behind any region that "+
		"these alone may write; once for each region")
	s.BoolVar(&a.asJSON, "json", false, "print what is served, and where, as JSON once it is")
	a.register(c)
	return c
}

// agent serves regions.
type agent struct {
	memberFlags
	listen, data string
	specs        []regionSpec
	asJSON       bool
	sentence     func(error) string

	mu     sync.Mutex // guards what peers' goroutines write
	stderr io.Writer
	peers  sync.WaitGroup
}

func (a *agent) check(regions []string) error {
	if a.listen == "" {
		return usagef("--listen is missing: say where peers connect, such as 10.0.0.2:7000")
	}
	host, _, err := net.SplitHostPort(a.listen)
	if err != nil {
		return usagef("--listen %q: want HOST:PORT", a.listen)
	}
	if a.data != "" && !slices.Contains(a.backends, tcpName) {
		return usagef("--data is of backend %s, which --backend does not name", tcpName)
	}
	if a.data == "" {
		a.data = net.JoinHostPort(host, "0")
	}
	if len(regions) == 0 {
		return usagef("--region is missing: say what to serve, such as kv=1GiB")
	}
	names := map[string]bool{}
	for _, text := range regions {
		s, err := parseRegion(text)
		if err != nil {
			return err
		}
		if names[s.name] {
			return usagef("--region %s is there twice", s.name)
		}
		if s.writers != nil && a.plaintext {
			return usagef("--region %s: peers have no names in plain text: take :rw= away, or say "+
				"--cert, --key and --ca", s.name)
		}
		names[s.name] = true
		a.specs = append(a.specs, s)
	}
	return a.memberFlags.check()
}

// extra are backends that the regions need beside those that reach peers.
func (a *agent) extra() []string {
	for _, s := range a.specs {
		if s.path != "" {
			return []string{posixName}
		}
	}
	return nil
}

// ignore keeps what guests send from filling the engine's inbox.
func ignore(ctx context.Context, all <-chan engine.Notification) {
	for {
		select {
		case <-all:
		case <-ctx.Done():
			return
		}
	}
}

func (a *agent) run(ctx context.Context, stdout, stderr io.Writer) (err error) {
	a.stderr = stderr
	id, err := a.identity()
	if err != nil {
		return err
	}
	if err := a.roomFor(hostmem.Limits()); err != nil {
		return err
	}
	l, err := net.Listen("tcp", a.listen) // before the backends, whose errors name other ports
	if err != nil {
		return fmt.Errorf("--listen %s: %w", a.listen, err)
	}
	defer l.Close()
	var regions []*served
	defer func() { // after the engine: peers are told before memory goes
		for _, r := range regions {
			err = errors.Join(err, r.free())
		}
	}()
	e, err := a.open(a.data, func(c *engine.Config) {
		c.OnPeer = a.attend
		c.Tell = func(peer string) map[string]*engine.Region { return tell(regions, peer) }
		c.OnRefused = func(from net.Addr, why error) {
			a.say("refused %v: %s", from, a.sentence(why))
		}
	}, a.extra()...)
	if errors.Is(err, driver.ErrBounds) { // of --data, which tcp reads
		return &usageError{err}
	}
	if err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, e.Close())
		a.peers.Wait()
	}()
	for _, s := range a.specs {
		r, err := s.serve(e)
		if err != nil {
			return err
		}
		regions = append(regions, r)
	}
	if err := a.announce(stdout, l.Addr(), a.privacy(id), regions); err != nil {
		return err
	}
	listening, end := context.WithCancel(ctx)
	a.peers.Go(func() { ignore(listening, e.Notifications()) })
	defer end()
	if err := e.Serve(ctx, l); ctx.Err() == nil {
		return err
	}
	if a.asJSON {
		return nil
	}
	return tellf(stdout, "ending: peers are told\n")
}

// roomFor refuses memory that the machine, or the cgroup of this process, does not have: it is
// taken as peers write to it, and the kernel would end the process then.
func (a *agent) roomFor(m hostmem.Machine) error {
	var need uint64
	for _, s := range a.specs {
		if s.path == "" {
			need += s.size
		}
	}
	if m.Available == 0 || need <= m.Available {
		return nil
	}
	return fmt.Errorf("the regions need %s of memory, and %s of %s are available: serve less, or "+
		"raise the limit of the container or service (memory.max of its cgroup)",
		bench.RoundSize(need), bench.RoundSize(m.Available), bench.RoundSize(m.Total))
}

func (a *agent) announce(w io.Writer, at net.Addr, privacy string, regions []*served) error {
	if a.asJSON {
		return printJSON(w, a.output(at, regions))
	}
	text := privacy
	for _, r := range regions {
		text += r.String() + "\n"
	}
	return tellf(w, "%sserving at %v\n", text, at)
}

// agentOutput is what an agent prints with --json once it serves.
type agentOutput struct {
	ServingAt string         `json:"serving_at"`
	Plaintext bool           `json:"plaintext"`
	Regions   []regionOutput `json:"regions"`
}

type regionOutput struct {
	Name     string `json:"name"`
	Size     uint64 `json:"size"`
	Path     string `json:"path,omitempty"` // of a file
	Offset   uint64 `json:"offset,omitempty"`
	ReadOnly bool   `json:"read_only"` // for peers that are none of Writers

	Writers []string `json:"writers,omitempty"`
}

func (a *agent) output(at net.Addr, regions []*served) agentOutput {
	o := agentOutput{ServingAt: at.String(), Plaintext: a.plaintext}
	for _, r := range regions {
		s := &r.spec
		o.Regions = append(o.Regions, regionOutput{s.name, max(s.size, s.n), s.path, s.off,
			s.writers != nil || s.path != "" && !s.write, s.writers})
	}
	return o
}

// attend looks after one peer until it is lost.
func (a *agent) attend(p *engine.Peer) {
	a.peers.Add(1)
	defer a.peers.Done()
	a.say("peer %q has connected from %s", p.Name(), p.Origin())
	<-p.Lost()
	_ = p.Close()
	a.say("peer %q from %s is lost or has closed", p.Name(), p.Origin())
}

func (a *agent) say(format string, args ...any) {
	a.mu.Lock()
	defer a.mu.Unlock()
	fmt.Fprintf(a.stderr, format+"\n", args...)
}
