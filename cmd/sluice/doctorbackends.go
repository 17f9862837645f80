// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/sluicehq/sluice/backends/byname"
	"github.com/sluicehq/sluice/backends/gds"
	"github.com/sluicehq/sluice/backends/posix"
	"github.com/sluicehq/sluice/backends/rdma"
	"github.com/sluicehq/sluice/backends/tcp"
	"github.com/sluicehq/sluice/cmd/sluice/internal/machine"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/identity"
)

// What each backend says of itself on this machine. ucx stands in a file of its own.

// posixChecks says by what files are read and written, by trying it.
func posixChecks() []machine.Check {
	c := machine.Check{Name: "io_uring", State: machine.OK, Backends: []string{"posix"},
		Why: "files are read and written through a ring"}
	var missing *driver.UnavailableError
	_, err := posix.Examine(posix.Config{Path: posix.PathRing})
	switch {
	case errors.As(err, &missing):
		c.State, c.Found, c.Fix = machine.Limited, missing.Reason, missing.Fix
		c.Why = "files go through a pool of threads with preadv and pwritev"
	case err != nil:
		return nil // to open the backend says it, too
	default:
		c.Found = "allowed, and has what posix uses"
	}
	return []machine.Check{c}
}

// gdsChecks says what cuFile says of itself: its version, its limits, and whether bytes bounce
// through the host. Which of cuFile and the engine's own chain is faster takes a measurement, which
// the check names.
func gdsChecks(spec backendSpec) []machine.Check {
	var cfg gds.Config
	if byname.SetOptions(&cfg, spec.words) != nil {
		return nil // to open the backend says it, too
	}
	c := machine.Check{Name: "cufile", State: machine.OK, Backends: []string{"gds"},
		Why: "sluice bench --lane gpufile measures it beside the staged route on this machine"}
	facts, err := gds.Examine(cfg)
	var missing *driver.UnavailableError
	switch {
	case errors.As(err, &missing):
		c.State, c.Found, c.Fix, c.Why = machine.Missing, missing.Reason, missing.Fix,
			"device memory and files are moved through host memory"
	case err != nil:
		return nil // to open the backend says it, too
	default:
		c.Found = facts.String()
		if facts.Compat {
			c.State, c.Fix = machine.Limited, "modprobe nvidia-fs, for disks and filesystems "+
				"that it serves"
		}
	}
	return []machine.Check{c}
}

// rdmaChecks says which ports there are, which GID each would use and why not another one,
// where they lie, and what is wrong with them. That none can be used at all is found by
// opening the backend.
func rdmaChecks(spec backendSpec) []machine.Check {
	var cfg rdma.Config
	if byname.SetOptions(&cfg, spec.words) != nil {
		return nil // to open the backend says it, too
	}
	found, err := rdma.Examine(cfg)
	if err != nil {
		return nil // to open the backend says it, too
	}
	var checks []machine.Check
	for i := range found.Devices {
		d := &found.Devices[i]
		for j := range d.Ports {
			checks = append(checks, rdmaPort(d, &d.Ports[j], found.Nodes))
			if gids := rdmaGIDs(&d.Ports[j]); gids != "" {
				checks = append(checks, rdmaCheck("rdma-gids "+d.Ports[j].Name, machine.Note, gids,
					"a wrong GID reaches no peer, or by another network", ""))
			}
		}
	}
	return checks
}

func rdmaCheck(name string, state machine.State, found, why, fix string) machine.Check {
	return machine.Check{Name: name, State: state, Found: found, Why: why, Fix: fix,
		Backends: []string{"rdma"}}
}

func rdmaPort(d *rdma.DeviceFinding, p *rdma.PortFinding, nodes int) machine.Check {
	facts := []string{p.State, p.Rate, p.LinkLayer}
	if p.MTU > 0 {
		facts = append(facts, fmt.Sprintf("MTU %d", p.MTU))
	}
	if d.Bus == "" {
		facts = append(facts, "software, on no bus")
	} else {
		facts = append(facts, "PCI "+strings.Join(d.Path, " > "))
	}
	if d.Node >= 0 {
		facts = append(facts, fmt.Sprintf("NUMA node %d of %d", d.Node, max(nodes, 1)))
	}
	c := rdmaCheck("rdma "+p.Name, machine.OK, strings.Join(facts, ", "),
		"memory goes over the ports that are near it", "")
	if !p.Chosen {
		c.State, c.Why = machine.Note, "not used: beyond Config.Rails, or not named"
	}
	for _, problem := range p.Problems {
		c.State, c.Fix, c.Why = machine.Limited, problem.Fix, problem.What
		c.Found += "; " + problem.What
	}
	return c
}

// rdmaGIDs lists the one that is taken first, and then why not the others.
func rdmaGIDs(p *rdma.PortFinding) string {
	var taken, others []string
	for i := range p.GIDs {
		g := &p.GIDs[i]
		text := fmt.Sprintf("%d %s", g.Index, g.Address.Unmap())
		if g.NetDev != "" {
			text += " on " + g.NetDev
		}
		text += " (" + g.Why + ")"
		if g.Chosen {
			taken = append(taken, "takes "+text)
		} else {
			others = append(others, "not "+text)
		}
	}
	return strings.Join(append(taken, others...), "; ")
}

// tcpChecks says where tcp would listen, and whether others can read what passes.
func tcpChecks(spec backendSpec) []machine.Check {
	c := machine.Check{Name: "tcp-privacy", State: machine.OK, Backends: []string{"tcp"}}
	opened, err := spec.openOne(1)
	if errors.Is(err, driver.ErrUnavailable) {
		return nil // to open the backend says it, too
	}
	if err != nil {
		c.State, c.Found = machine.Missing, oneLine(err)
		c.Why = "the files and the port are those of the command line"
		c.Fix = "name files that are there and belong together, and a port that is free"
		return []machine.Check{c}
	}
	b := opened.(*tcp.Backend)
	defer b.Close()
	places, secure, err := tcp.Places(b.Addr())
	if err != nil {
		return nil // of an address of its own it cannot be
	}
	var s byname.TCP
	if err := byname.SetOptions(&s, spec.words); err != nil {
		return nil // it has been opened with them
	}
	at := strings.Join(places, ", ")
	switch {
	case s.Certificate != "":
		c.Found, c.Why = fmt.Sprintf("TLS 1.3 with certificates of both sides, at %s", at),
			"no third party reads or changes what passes"
	case secure:
		c.Found, c.Why = fmt.Sprintf("TLS 1.3 by a key of its own, at %s", at),
			"peers know it by the description that names the key"
	case s.Listen == "":
		c.Found, c.Why = fmt.Sprintf("plain text, at %s: this host alone", at),
			"peers of other hosts need --backend tcp:listen=HOST:PORT with certificates"
	default:
		c.State, c.Found = machine.Limited, fmt.Sprintf("plain text, at %s", at)
		c.Why, c.Fix = "everybody on the network may read and change what passes",
			"leave plaintext out, or say certificate, key and authority"
	}
	checks := []machine.Check{c}
	if s.Certificate != "" {
		checks = append(checks, certificateCheck(&s, time.Now()))
	}
	return checks
}

// renewal is how long before its end a certificate is worth a word.
const renewal = 14 * 24 * time.Hour

// certificateCheck looks at what peers are shown: by tcp, and by engines that introduce themselves.
func certificateCheck(s *byname.TCP, now time.Time) machine.Check {
	c := machine.Check{Name: "certificate", State: machine.OK, Backends: []string{"tcp"}}
	id, err := identity.FromFiles(s.Certificate, s.Key, s.Authority)
	if err != nil {
		c.State, c.Found, c.Why = machine.Missing, oneLine(err), "peers refuse it"
		return c
	}
	f := id.Facts()
	c.Found = fmt.Sprintf("of %q, by %q, for %s, until %s", f.Name, f.Issuer,
		strings.Join(f.Hosts, ", "), f.NotAfter.UTC().Format(time.DateOnly))
	c.Why = "peers of the same authority are served, no others"
	info, err := os.Stat(s.Key)
	switch {
	case f.NotAfter.Sub(now) < renewal:
		c.State, c.Why, c.Fix = machine.Limited, "it ends soon", "issue a new one: it is in "+
			"use from the next handshake on"
	case err == nil && info.Mode().Perm()&0o007 != 0:
		c.State, c.Why, c.Fix = machine.Limited, "every user of this host can read its key",
			"chmod 600 "+s.Key
	}
	return c
}
