// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/seal"
	"github.com/sluicehq/sluice/kv/tier/object"
	"github.com/sluicehq/sluice/kv/tier/object/s3"
	"github.com/sluicehq/sluice/kv/weights"
)

// fromEnvironment fills in what the variables of other tools for S3 say.
func fromEnvironment(c s3.Config) s3.Config {
	c.Endpoint = cmp.Or(c.Endpoint, os.Getenv("AWS_ENDPOINT_URL_S3"), os.Getenv("AWS_ENDPOINT_URL"))
	c.Region = cmp.Or(c.Region, os.Getenv("AWS_REGION"), os.Getenv("AWS_DEFAULT_REGION"))
	return c
}

// registerStore adds the flags that say how an object store is reached.
func registerStore(s *pflag.FlagSet, c *s3.Config) {
	s.StringVar(&c.Endpoint, "endpoint", "", "`URL` of the store of s3:// names; else "+
		"$AWS_ENDPOINT_URL_S3, $AWS_ENDPOINT_URL, or AWS")
	s.StringVar(&c.Region, "region", "", "of the store; else $AWS_REGION, or us-east-1")
	s.BoolVar(&c.PathStyle, "path-style", false, "the bucket is a part of the URL's path")
}

// readTimeout is how long a store may take to begin an answer, and for each 8 MiB of it.
const readTimeout = 30 * time.Second

// objectsOf returns the safetensors files that an s3:// name stands for: an object, or all below a
// prefix.
func objectsOf(ctx context.Context, url string, c s3.Config) (list []weights.Source, err error) {
	var name string
	var ok bool
	if c.Bucket, name, ok = s3.ParseURL(url); !ok {
		return nil, usagef("%q: want s3://BUCKET/PREFIX", url)
	}
	bucket, err := s3.Open(fromEnvironment(c))
	if err != nil {
		return nil, err
	}
	reader := object.Readers(ctx, bucket, readTimeout)
	within, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	dir := name
	if dir != "" && !strings.HasSuffix(dir, "/") {
		dir += "/"
	}
	err = bucket.List(within, name, func(o object.Info) error {
		src := weights.Source{Name: "s3://" + c.Bucket + "/" + o.Name, ReaderAt: reader(o),
			Size: o.Size}
		switch {
		case o.Name == name:
			list = []weights.Source{src}
			return errFound
		case strings.HasPrefix(o.Name, dir) && strings.HasSuffix(o.Name, ".safetensors"):
			list = append(list, src)
		}
		return nil
	})
	if err != nil && !errors.Is(err, errFound) {
		return nil, fmt.Errorf("list %s: %w", url, err)
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("%s: there is no such object, and none below it ends in "+
			".safetensors", url)
	}
	slices.SortFunc(list, func(a, b weights.Source) int { return strings.Compare(a.Name, b.Name) })
	return list, nil
}

var errFound = errors.New("found")

// objectConfig is the [object] table of a cache's config.
type objectConfig struct {
	bucket s3.Config
	tier   object.Config
}

// complete sets the defaults of a node.
func (c *objectConfig) complete(node string) {
	c.tier.Prefix = cmp.Or(c.tier.Prefix, node+"/")
}

// lockStore waits until no other process of the node uses its objects. One that ends writes some
// after it has left the files of its cache to the next one, which would not know of them.
func lockStore(ctx context.Context, path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return nil, errors.Join(fmt.Errorf("another process has %s: %w: %w", path, err,
				engine.ErrBusy), f.Close())
		}
	}
}

// open opens the tier, which makes no request before it returns.
func (c *objectConfig) open(keys *seal.Keys) (*object.Tier, error) {
	bucket, err := s3.Open(fromEnvironment(c.bucket))
	if err != nil {
		return nil, err
	}
	cfg := c.tier
	cfg.Bucket = bucket
	if keys != nil { // no interface of a nil pointer
		cfg.Seal = keys
	}
	return object.Open(cfg)
}

// check says what open would refuse.
func (c *objectConfig) check() error {
	if c.bucket.Bucket == "" {
		return fmt.Errorf("want a bucket: %w", engine.ErrBounds)
	}
	_, err := s3.Open(c.bucket)
	return cmp.Or(err, c.tier.Check())
}
