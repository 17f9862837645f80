// SPDX-License-Identifier: Apache-2.0

// Package s3 has the object stores of that protocol, for package object and for weights. It is a
// package of its own so that who does not import it compiles no client of S3.
package s3

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/tier/object"
)

// Config names a bucket. Who may use it the usual chain says: the variables AWS_ACCESS_KEY_ID,
// AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, the file ~/.aws/credentials, and the role of the
// machine or of the pod; without any of them requests are not signed.
type Config struct {
	Bucket    string
	Endpoint  string // URL; default: that of AWS in the region
	Region    string // default us-east-1
	PathStyle bool   // the bucket is a part of the path, not of the host's name
}

// Bucket implements object.Bucket.
type Bucket struct {
	client *minio.Client
	name   string
}

const partBytes = 16 << 20 // of an upload of several parts, which all but the last one have

// Open makes no request.
func Open(cfg Config) (*Bucket, error) {
	region := cmp.Or(cfg.Region, "us-east-1")
	at, err := url.Parse(cmp.Or(cfg.Endpoint, "https://s3."+region+".amazonaws.com"))
	if err != nil || at.Host == "" || strings.Trim(at.Path, "/") != "" || at.Scheme != "https" &&
		at.Scheme != "http" || at.User != nil {
		shown := "of another form" // which may have a password in it
		if err == nil {
			shown = at.Redacted()
		}
		return nil, fmt.Errorf("s3: endpoint %q: want https://HOST or https://HOST:PORT: %w",
			shown, engine.ErrBounds)
	}
	if cfg.Bucket == "" {
		return nil, fmt.Errorf("s3: no bucket: %w", engine.ErrBounds)
	}
	lookup := minio.BucketLookupAuto
	if cfg.PathStyle {
		lookup = minio.BucketLookupPath
	}
	transport, err := minio.DefaultTransport(at.Scheme == "https")
	if err != nil {
		return nil, fmt.Errorf("s3: %w", err)
	}
	transport.DisableCompression = true
	client, err := minio.New(at.Host, &minio.Options{
		Creds: credentials.NewChainCredentials([]credentials.Provider{&credentials.EnvAWS{},
			&credentials.FileAWSCredentials{},
			&credentials.IAM{Client: &http.Client{Timeout: 5 * time.Second}}}),
		Secure: at.Scheme == "https", Region: region, BucketLookup: lookup,
		Transport:  bounded{transport},
		MaxRetries: 1}) // package object has its own retries
	if err != nil {
		return nil, fmt.Errorf("s3: %w: %w", err, engine.ErrBounds)
	}
	return &Bucket{client, cfg.Bucket}, nil
}

// bounded bounds the answers that the client of S3 reads as a whole: all but ranges of objects.
type bounded struct{ http.RoundTripper }

const answerMax = 16 << 20 // a page of a list has 1,000 names of 1 KiB, which escapes make longer

func (b bounded) RoundTrip(r *http.Request) (*http.Response, error) {
	a, err := b.RoundTripper.RoundTrip(r)
	if err != nil || a.StatusCode == http.StatusPartialContent {
		return a, err
	}
	body := bufio.NewReader(io.LimitReader(a.Body, answerMax))
	if a.StatusCode == http.StatusOK && r.URL.Query().Has("list-type") {
		// The client takes an error of that status for a list of nothing.
		if p, _ := body.Peek(1 << 10); !bytes.Contains(p, []byte("<ListBucketResult")) {
			_ = a.Body.Close()
			return nil, fmt.Errorf("no list, but %.100q", p)
		}
	}
	a.Body = struct {
		io.Reader
		io.Closer
	}{body, a.Body}
	return a, nil
}

// Put implements object.Bucket. Long objects go in parts, several at a time.
func (b *Bucket) Put(ctx context.Context, name string, p []byte) error {
	_, err := b.client.PutObject(ctx, b.name, name, bytes.NewReader(p), int64(len(p)),
		minio.PutObjectOptions{ContentType: "application/octet-stream", PartSize: partBytes,
			NumThreads: 4})
	return of(err)
}

// Get implements object.Bucket. A store that sends other bytes than those that were asked for says
// so in its answer, mostly.
func (b *Bucket) Get(ctx context.Context, name, version string, offset int64,
	into [][]byte) error {
	n := int64(0)
	for _, p := range into {
		n += int64(len(p))
	}
	if n == 0 {
		return nil
	}
	var o minio.GetObjectOptions
	if err := o.SetRange(offset, offset+n-1); err != nil {
		return err
	}
	if version != "" {
		o.Set("If-Match", `"`+version+`"`)
	}
	body, info, header, err := minio.Core{Client: b.client}.GetObject(ctx, b.name, name, o)
	if err != nil {
		return of(err)
	}
	defer body.Close()
	if version != "" && info.ETag != version {
		return changed(fmt.Errorf("ETag %q, listed %q", info.ETag, version))
	}
	which := header.Get("Content-Range")
	if want := fmt.Sprintf("bytes %d-%d/", offset, offset+n-1); !strings.HasPrefix(which, want) {
		return fmt.Errorf("s3: asked for %s…, the answer is of %q", want, which)
	}
	for _, p := range into {
		if _, err := io.ReadFull(body, p); err != nil {
			return of(err)
		}
	}
	return nil
}

// List implements object.Bucket.
func (b *Bucket) List(ctx context.Context, prefix string, visit func(object.Info) error) error {
	ctx, cancel := context.WithCancel(ctx) // ends the goroutine that lists
	defer cancel()
	for o := range b.client.ListObjects(ctx, b.name, minio.ListObjectsOptions{Prefix: prefix,
		Recursive: true}) {
		err := of(o.Err)
		if err == nil {
			err = visit(object.Info{Name: o.Key, Size: o.Size, At: o.LastModified,
				Version: o.ETag})
		}
		if err != nil {
			return err
		}
	}
	return context.Cause(ctx)
}

// Delete implements object.Bucket.
func (b *Bucket) Delete(ctx context.Context, name string) error {
	return of(b.client.RemoveObject(ctx, b.name, name, minio.RemoveObjectOptions{}))
}

// AbortUploads implements object.Bucket.
func (b *Bucket) AbortUploads(ctx context.Context, prefix string, before time.Time) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for u := range b.client.ListIncompleteUploads(ctx, b.name, prefix, true) {
		err := u.Err
		if err == nil && u.Initiated.Before(before) {
			err = minio.Core{Client: b.client}.AbortMultipartUpload(ctx, b.name, u.Key, u.UploadID)
		}
		if err != nil {
			return of(err)
		}
	}
	return context.Cause(ctx)
}

// of gives an error of the client the kind that object.Bucket says.
func of(err error) error {
	switch r := minio.ToErrorResponse(err); {
	case err == nil:
		return nil
	case r.Code == "NoSuchKey":
		return fmt.Errorf("s3: %w: %w", err, fs.ErrNotExist)
	case r.StatusCode == http.StatusPreconditionFailed:
		return changed(err)
	case r.Code == "NoSuchBucket":
		return fmt.Errorf("s3: %w: make the bucket, or name another: %w", err, fs.ErrPermission)
	case r.StatusCode == http.StatusForbidden || r.StatusCode == http.StatusUnauthorized:
		return fmt.Errorf("s3: %w: give this process credentials for the bucket, by "+
			"AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or ~/.aws/credentials: %w", err,
			fs.ErrPermission)
	}
	return fmt.Errorf("s3: %w", err)
}

func changed(err error) error {
	return fmt.Errorf("s3: the object has changed since it was listed: %w: %w", err,
		engine.ErrCorrupt)
}

// ParseURL reads s3://BUCKET/NAME. Of another text ok is false.
func ParseURL(text string) (bucket, name string, ok bool) {
	rest, ok := strings.CutPrefix(text, "s3://")
	bucket, name, _ = strings.Cut(rest, "/")
	return bucket, name, ok && bucket != ""
}
