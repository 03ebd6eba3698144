// Answers for the names of addresses without a resolver, after RESOLVER_US microseconds; to be preloaded.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <stdlib.h>
#include <unistd.h>

typedef int (*Lookup)(const struct sockaddr *, socklen_t, char *, socklen_t, char *, socklen_t, int);

int getnameinfo(const struct sockaddr *address, socklen_t length, char *host, socklen_t host_length, char *service,
                socklen_t service_length, int flags) {
  const char *delay = getenv("RESOLVER_US");
  if (delay && atoi(delay) > 0) usleep(atoi(delay));
  Lookup lookup = (Lookup)dlsym(RTLD_NEXT, "getnameinfo");
  return lookup(address, length, host, host_length, service, service_length, flags | NI_NUMERICHOST);
}
