// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/sluicehq/sluice/backends/rdma"
	"github.com/sluicehq/sluice/driver"
)

// rdmaName is the backend that rdmaFlags are for.
const rdmaName = "rdma"

// rdmaFlags are what a command line says about the rdma backend, and about nothing else.
type rdmaFlags struct {
	devices        string // by networkFlags
	listen         string
	depth, entries int
	peers          string // devices of the process at the other end
}

func (r *rdmaFlags) register(c *cobra.Command) {
	s := c.Flags()
	s.StringVar(&r.listen, "listen", "", "of backend rdma alone: HOST:PORT for the control "+
		"connections of peers; without it the addresses of the devices, and a free port")
	s.IntVar(&r.depth, "depth", 0, "of backend rdma alone: work requests under way on a queue "+
		"pair; 0: what the backend thinks right")
	s.IntVar(&r.entries, "entries", 0, "of backend rdma alone: pieces of this side in one work "+
		"request at most; 0: as many as the device takes")
}

// registerPeers is for commands that start a process at the other end.
func (r *rdmaFlags) registerPeers(c *cobra.Command) {
	c.Flags().StringVar(&r.peers, "peer-devices", "", "of backend rdma alone: --devices of the "+
		"process at the other end; without it the same")
}

// given names the flags that were set.
func (r *rdmaFlags) given() []string {
	var names []string
	for _, f := range []struct {
		name string
		set  bool
	}{{"--listen", r.listen != ""}, {"--depth", r.depth != 0}, {"--entries", r.entries != 0},
		{"--peer-devices", r.peers != ""}} {
		if f.set {
			names = append(names, f.name)
		}
	}
	return names
}

func (r *rdmaFlags) check(backend string) error {
	if names := r.given(); len(names) > 0 && backend != rdmaName {
		return usagef("%s is of backend %s alone: say --backend %s, not %q", names[0], rdmaName,
			rdmaName, backend)
	}
	if r.depth < 0 || r.entries < 0 {
		return usagef("--depth %d, --entries %d: want 1 or more, or 0 for what the backend "+
			"thinks right", r.depth, r.entries)
	}
	return nil
}

// config is the backend's.
func (r *rdmaFlags) config() rdma.Config {
	return rdma.Config{Devices: r.devices, Listen: r.listen, QueueDepth: r.depth,
		Entries: r.entries}
}

// other names the devices of the process at the other end.
func (r *rdmaFlags) other() string {
	if r.peers != "" {
		return r.peers
	}
	return r.devices
}

// examine opens what either process will open, as each would.
func (r *rdmaFlags) examine() error {
	for _, devices := range []string{r.devices, r.other()} {
		cfg := r.config()
		cfg.Devices = devices
		b, err := rdma.New(cfg)
		switch {
		case errors.Is(err, driver.ErrBounds):
			return &usageError{fmt.Errorf("--devices, --listen, --depth or --entries: %w", err)}
		case err != nil:
			return err
		}
		if err := b.Close(); err != nil {
			return err
		}
		if r.peers == "" {
			break
		}
	}
	return nil
}

// args are the flags once more, for a child process.
func (r *rdmaFlags) args() []string {
	var list []string
	if r.listen != "" {
		list = append(list, "--listen="+r.listen)
	}
	return number(number(list, "depth", r.depth), "entries", r.entries)
}
